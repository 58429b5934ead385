//! Results of a pass: sums of the loss and of the objective's metrics, scores by sequence.

use super::token_loss::Reduction;
use firebrick_core::Result;
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
