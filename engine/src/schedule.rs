//! Runs a plan: forward over segments, the head in chunks of rows, backward over segments.
//!
//! Everything the plan decides happens between two segments; units know nothing of it.

use crate::Result;
use crate::batch::{Cut, MicroBatch, Sequence, pack};
use crate::gradients::{Gradients, device_error};
use crate::objective::{Metric, Reduce, Scores, TokenInputs, TokenLoss};
use crate::plan::{Keep, ModelPlan, Segment};
use burn::tensor::Tensor;
use firebrick_models::Decoder;
use firebrick_models::head::TokenScores;
use firebrick_models::unit::Weights;

/// Executes a [`ModelPlan`] on a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Schedule<'a> {
    decoder: &'a Decoder,
    plan: &'a ModelPlan,
    temperature: f64,
}

/// Log-probs and entropies of a micro-batch's scored tokens, by sequence.
#[derive(Clone, Debug, Default)]
pub struct MicroScores {
    /// Log-probs.
    pub logp: Vec<Vec<f32>>,
    /// Entropies.
    pub entropy: Vec<Vec<f32>>,
}

/// Sums that a backward pass leaves behind: the loss and the objective's metrics.
#[derive(Clone, Debug, Default)]
pub struct LossSums {
    /// Sum of the loss.
    pub loss: f64,
    /// Scored tokens.
    pub tokens: usize,
    /// Metric sums, in the order in which the objective reports them.
    pub metrics: Vec<(&'static str, Reduce, f64)>,
}

impl LossSums {
    /// Adds another micro-batch's sums.
    pub fn absorb(&mut self, other: &Self) {
        self.loss += other.loss;
        self.tokens += other.tokens;
        for &(name, reduce, sum) in &other.metrics {
            match self.metrics.iter_mut().find(|(n, ..)| *n == name) {
                Some((.., total)) => *total += sum,
                None => self.metrics.push((name, reduce, sum)),
            }
        }
    }

    /// Metric values.
    pub fn values(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let tokens = self.tokens.max(1) as f64;
        self.metrics
            .iter()
            .map(move |&(name, reduce, sum)| match reduce {
                Reduce::Sum => (name, sum),
                Reduce::TokenMean => (name, sum / tokens),
            })
    }
}

/// What a segment left behind.
#[allow(clippy::large_enum_variant, reason = "one a segment")]
enum Saved {
    Input(Tensor<2>),
    Graph(Traced),
}

/// A segment under a graph: leaves and root.
struct Traced {
    input: Tensor<2>,
    weights: Vec<Weights>,
    output: Tensor<2>,
}

impl<'a> Schedule<'a> {
    /// A schedule for a decoder. Log-probs are those of logits / temperature.
    #[must_use]
    pub fn new(decoder: &'a Decoder, plan: &'a ModelPlan, temperature: f64) -> Self {
        Self {
            decoder,
            plan,
            temperature,
        }
    }

    /// Scores a micro-batch without a graph.
    pub fn score(&self, micro: &MicroBatch) -> Result<MicroScores> {
        let hidden = self
            .decoder
            .hidden(micro.ids.clone(), &micro.ctx)
            .select(0, micro.rows.clone());
        let head = self.decoder.head();
        let (mut logp, mut entropy) = (Vec::new(), Vec::new());
        for (start, len) in self.chunks(micro.scored()) {
            let TokenScores {
                logp: l,
                entropy: e,
            } = head.score(
                hidden.clone().narrow(0, start, len),
                micro.targets.clone().narrow(0, start, len),
                self.temperature,
            );
            logp.push(l);
            entropy.push(e);
        }
        Ok(MicroScores {
            logp: by_sequence(logp, &micro.lengths)?,
            entropy: by_sequence(entropy, &micro.lengths)?,
        })
    }

    /// Forward and backward of a micro-batch: adds to `gradients`, returns the sums of its loss.
    pub fn backward(
        &self,
        micro: &MicroBatch,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<LossSums> {
        let (hidden, saved) = self.forward(micro);
        let (d_scored, sums) = self.head(micro, hidden, loss, gradients)?;
        // unscored rows read the row of zeros that stands behind the scored ones: a gather, not a scatter
        let d = d_scored.dims()[1];
        let zero = Tensor::<2>::zeros([1, d], &d_scored.device());
        let mut d_rows = Tensor::cat(vec![d_scored, zero], 0).select(0, micro.places.clone());
        for (segment, saved) in self.plan.segments.iter().zip(saved).rev() {
            d_rows = self.segment_backward(segment, saved, d_rows, micro, gradients);
        }
        if let Some(scale) = self.decoder.arch().embedding_scale {
            d_rows = d_rows * scale;
        }
        let table = [self.decoder.arch().vocab_size, d];
        gradients.add_rows(0, table, micro.ids.clone(), d_rows);
        Ok(sums)
    }

    fn forward(&self, micro: &MicroBatch) -> (Tensor<2>, Vec<Saved>) {
        let mut x = self.decoder.embed(micro.ids.clone());
        let mut saved = Vec::with_capacity(self.plan.segments.len());
        for segment in &self.plan.segments {
            match segment.keep {
                Keep::Graph => {
                    let traced = self.trace(segment, x, micro);
                    x = traced.output.clone().inner();
                    saved.push(Saved::Graph(traced));
                }
                Keep::Input => {
                    saved.push(Saved::Input(x.clone()));
                    for unit in segment.units.clone() {
                        x = self.decoder.run(
                            unit,
                            &self.decoder.units()[unit].weights,
                            x,
                            &micro.ctx,
                        );
                    }
                }
            }
        }
        (x, saved)
    }

    /// Runs a segment with its input and weights as leaves.
    fn trace(&self, segment: &Segment, x: Tensor<2>, micro: &MicroBatch) -> Traced {
        let input = x.autodiff().require_grad();
        let mut output = input.clone();
        let mut weights = Vec::with_capacity(segment.units.len());
        for unit in segment.units.clone() {
            let leaves = self.decoder.units()[unit]
                .weights
                .map(|w| w.clone().autodiff().require_grad());
            output = self.decoder.run(unit, &leaves, output, &micro.ctx);
            weights.push(leaves);
        }
        Traced {
            input,
            weights,
            output,
        }
    }

    fn segment_backward(
        &self,
        segment: &Segment,
        saved: Saved,
        d_output: Tensor<2>,
        micro: &MicroBatch,
        gradients: &mut Gradients,
    ) -> Tensor<2> {
        let Traced {
            input,
            weights,
            output,
        } = match saved {
            Saved::Graph(traced) => traced,
            Saved::Input(x) => self.trace(segment, x, micro),
        };
        // a product with the incoming gradient as root: its own gradient is one
        let mut grads = (output * d_output).sum().backward();
        for (unit, leaves) in segment.units.clone().zip(&weights) {
            for (index, leaf) in self.decoder.units()[unit]
                .range
                .clone()
                .zip(leaves.tensors())
            {
                if let Some(gradient) = leaf.grad_remove(&mut grads) {
                    gradients.add(index, gradient);
                }
            }
        }
        input
            .grad_remove(&mut grads)
            .unwrap_or_else(|| input.inner().zeros_like())
    }

    /// Head and loss, chunk by chunk: each chunk's logits live for its own loss and gradient only.
    fn head(
        &self,
        micro: &MicroBatch,
        hidden: Tensor<2>,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        let hidden = hidden.select(0, micro.rows.clone());
        let head = self.decoder.head();
        let projection = self.decoder.projection_index();
        let units = self.decoder.units();
        let norm = units[units.len() - 1].range.start;
        let mut d_hidden = Vec::new();
        let mut sums: Option<(Vec<Metric>, Tensor<1>)> = None;
        for (start, len) in self.chunks(micro.scored()) {
            let targets = micro.targets.clone().narrow(0, start, len);
            let chunk = head.chunk(
                hidden.clone().narrow(0, start, len),
                targets,
                self.temperature,
            );
            let scores = Scores {
                logp: chunk.scores.logp.clone().autodiff().require_grad(),
                entropy: chunk.scores.entropy.clone().autodiff().require_grad(),
            };
            let loss = loss.loss(&scores, &narrow(&micro.inputs, start, len));
            let mut grads = loss.total.backward();
            let d_logp = scores
                .logp
                .grad_remove(&mut grads)
                .unwrap_or_else(|| chunk.scores.logp.zeros_like());
            let d_entropy = scores.entropy.grad_remove(&mut grads);
            let chunk = chunk.backward(d_logp, d_entropy);
            gradients.add(norm, chunk.norm);
            gradients.add(projection, chunk.projection);
            d_hidden.push(chunk.hidden);
            accumulate(&mut sums, loss.metrics, loss.total.inner());
        }
        let sums = read_sums(sums, micro.scored())?;
        let d_hidden = if d_hidden.is_empty() {
            hidden
        } else {
            Tensor::cat(d_hidden, 0)
        };
        Ok((d_hidden, sums))
    }

    fn chunks(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let size = self.plan.head_rows;
        (0..rows)
            .step_by(size)
            .map(move |start| (start, size.min(rows - start)))
    }
}

/// Log-probs and entropies of sequences, in their order, in micro-batches under the budget.
pub fn score_all(
    decoder: &Decoder,
    plan: &ModelPlan,
    sequences: &[Sequence],
    cut: Cut,
    temperature: f64,
) -> Result<MicroScores> {
    let schedule = Schedule::new(decoder, plan, temperature);
    let mut scores = MicroScores {
        logp: vec![Vec::new(); sequences.len()],
        entropy: vec![Vec::new(); sequences.len()],
    };
    for indices in pack(sequences, cut)? {
        let own: Vec<&Sequence> = indices.iter().map(|&i| &sequences[i]).collect();
        let micro = MicroBatch::new(decoder.arch(), &own, decoder.device());
        let own = schedule.score(&micro)?;
        for ((i, logp), entropy) in indices.into_iter().zip(own.logp).zip(own.entropy) {
            scores.logp[i] = logp;
            scores.entropy[i] = entropy;
        }
    }
    Ok(scores)
}

fn narrow(inputs: &TokenInputs, start: usize, len: usize) -> TokenInputs {
    let cut = |t: &Tensor<1>| t.clone().narrow(0, start, len);
    TokenInputs {
        weight: cut(&inputs.weight),
        advantage: cut(&inputs.advantage),
        old_logp: inputs.old_logp.as_ref().map(cut),
        ref_logp: inputs.ref_logp.as_ref().map(cut),
    }
}

fn accumulate(sums: &mut Option<(Vec<Metric>, Tensor<1>)>, metrics: Vec<Metric>, loss: Tensor<1>) {
    let mut values: Vec<Tensor<1>> = metrics.iter().map(|m| m.sum.clone()).collect();
    values.push(loss);
    let values = Tensor::cat(values, 0);
    *sums = Some(match sums.take() {
        None => (metrics, values),
        Some((metrics, total)) => (metrics, total + values),
    });
}

/// One read for all of a micro-batch's numbers.
fn read_sums(sums: Option<(Vec<Metric>, Tensor<1>)>, tokens: usize) -> Result<LossSums> {
    let Some((metrics, values)) = sums else {
        return Ok(LossSums::default());
    };
    let values: Vec<f64> = values
        .try_into_vec_as()
        .map_err(|e| device_error("reading the loss", &e))?;
    Ok(LossSums {
        loss: values[metrics.len()],
        tokens,
        metrics: metrics
            .iter()
            .zip(&values)
            .map(|(m, &v)| (m.name, m.reduce, v))
            .collect(),
    })
}

fn by_sequence(chunks: Vec<Tensor<1>>, lengths: &[usize]) -> Result<Vec<Vec<f32>>> {
    let mut flat: Vec<f32> = Vec::new();
    for chunk in chunks {
        flat.extend(
            chunk
                .try_into_vec_as::<f32>()
                .map_err(|e| device_error("reading log-probs", &e))?,
        );
    }
    let mut rest = flat.as_slice();
    Ok(lengths
        .iter()
        .map(|&n| {
            let (own, others) = rest.split_at(n);
            rest = others;
            own.to_vec()
        })
        .collect())
}
