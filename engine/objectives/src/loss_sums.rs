//! Results of a pass: sums of the loss and of the objective's metrics, scores by sequence.

use super::token_loss::{Loss, Metric, Reduction};
use burn::tensor::Tensor;
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_core::world::World;
use firebrick_models::routing::Routes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The metric of the auxiliary loss of routers.
pub const ROUTER_AUX_LOSS: &str = "actor/router_aux_loss";

/// Log-probs and entropies of a micro-batch's scored tokens, by sequence.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct MicroScores {
    /// Log-probs.
    pub logp: Vec<Vec<f32>>,
    /// Entropies.
    pub entropy: Vec<Vec<f32>>,
    /// Values, if they were requested of a model with a value head.
    pub values: Vec<Vec<f32>>,
    /// Expert routes of all tokens in a model with experts; empty otherwise.
    pub routes: Vec<Option<Routes>>,
}

/// Sums of a backward pass: the loss and the objective's metrics.
#[derive(Clone, Debug, Default)]
pub struct LossSums {
    /// Sum of the loss.
    pub loss: f64,
    /// Scored tokens.
    pub tokens: usize,
    /// Sequences with scored tokens.
    pub sequences: usize,
    /// Metric sums, in the order in which the objective reports them.
    pub metrics: Vec<(&'static str, Reduction, f64)>,
}

impl LossSums {
    /// Adds another micro-batch's sums.
    pub fn absorb(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        self.sequences += other.sequences;
        for &(name, reduction, sum) in &other.metrics {
            match self.metrics.iter_mut().find(|(n, ..)| *n == name) {
                Some((.., total)) => *total = reduction.combine(*total, sum),
                None => self.metrics.push((name, reduction, sum)),
            }
        }
    }

    /// Adds another loss of the same tokens, times a coefficient; its metrics stay what they are.
    pub fn join(&mut self, other: Self, coefficient: f64) {
        self.loss += coefficient * other.loss;
        self.metrics.extend(other.metrics);
    }

    /// The sums of all ranks' micro-batches, added in the order of the ranks: the same on every rank.
    ///
    /// # Errors
    /// `Error::Device` where another rank fails, `Error::Ranks` where one runs another build.
    pub fn gather(self, world: &World) -> Result<Self> {
        type Sums = (f64, usize, usize, Vec<(String, Reduction, f64)>);
        if world.is_solo() {
            return Ok(self);
        }
        let Self { loss, tokens, sequences, metrics } = self;
        let mut sums = Self::default();
        for (loss, tokens, sequences, metrics) in world.gather::<Sums>(&(loss, tokens, sequences, metrics))? {
            let metrics = metrics.into_iter().map(|(name, reduction, sum)| (interned(&name), reduction, sum)).collect();
            sums.absorb(&Self { loss, tokens, sequences, metrics });
        }
        Ok(sums)
    }

    /// Metric values.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let (tokens, sequences) = (self.tokens, self.sequences);
        self.metrics.iter().map(move |&(name, reduction, sum)| (name, reduction.value(sum, tokens, sequences)))
    }
}

/// A metric's name as other ranks have it. There are a few dozen in a process, which are kept to its end.
fn interned(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.into());
    names.insert(kept);
    kept
}

/// Sums on the device while a micro-batch's chunks add to them.
#[derive(Default)]
pub struct LossAccumulator(Option<(Vec<Metric>, Tensor<1>)>);

impl LossAccumulator {
    /// Adds the sums of a chunk, without waiting for the device.
    pub fn add(&mut self, loss: Loss) {
        let mut values: Vec<Tensor<1>> = loss.metrics.iter().map(|m| m.sum.clone()).collect();
        values.push(loss.total.inner());
        let values = Tensor::cat(values, 0);
        self.0 = Some(match self.0.take() {
            None => (loss.metrics, values),
            Some((metrics, total)) => {
                let sums = total.clone() + values.clone();
                let merged = metrics.iter().enumerate().fold(sums, |sums, (i, metric)| {
                    let [a, b] = [&total, &values].map(|t| t.clone().narrow(0, i, 1));
                    let extreme = match metric.reduction {
                        Reduction::Min => a.min_pair(b),
                        Reduction::Max => a.max_pair(b),
                        Reduction::Sum | Reduction::TokenMean | Reduction::SequenceMean => {
                            return sums;
                        }
                    };
                    sums.slice_assign(i..=i, extreme)
                });
                (metrics, merged)
            }
        });
    }

    /// One read for all of a micro-batch's numbers, given its scored tokens and the sequences that have any.
    ///
    /// # Errors
    /// `Error::Device` if the values cannot be read.
    pub fn read(self, tokens: usize, sequences: usize) -> Result<LossSums> {
        let Some((metrics, values)) = self.0 else {
            return Ok(LossSums::default());
        };
        let values: Vec<f64> = values.try_into_vec_as().map_err(|e| device_error("reading the loss", &e))?;
        Ok(LossSums {
            loss: values[metrics.len()],
            tokens,
            sequences,
            metrics: metrics.iter().zip(&values).map(|(m, &v)| (m.name, m.reduction, v)).collect(),
        })
    }
}

/// Values of chunks of scored tokens, by sequence.
///
/// # Errors
/// `Error::Device` if the values cannot be read.
pub fn split_by_sequence(chunks: Vec<Tensor<1>>, lengths: &[usize]) -> Result<Vec<Vec<f32>>> {
    let mut flat: Vec<f32> = Vec::new();
    for chunk in chunks {
        flat.extend(chunk.try_into_vec_as::<f32>().map_err(|e| device_error("reading log-probs", &e))?);
    }
    let mut rest = flat.as_slice();
    Ok(lengths
        .iter()
        .map(|&n| {
            let (values, others) = rest.split_at(n);
            rest = others;
            values.to_vec()
        })
        .collect())
}
