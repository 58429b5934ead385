//! The head and the loss, a chunk of rows at a time: each chunk's logits live for its own loss and gradient only.
//!
//! Losses that separate over tokens need one pass. Losses that look at whole sequences get all log-probs from a pass
//! without gradients first, are differentiated on those vectors, and the chunks run a second time with the result.

use super::non_finite::FiniteCheck;
use super::runtime::Runtime;
use super::segment::PassContext;
use super::tensor_parallel::{gather, sum};
use crate::Gradients;
use crate::batch::MicroBatch;
use burn::tensor::{Int, Tensor};
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_models::head::{Head, HeadChunk, HeadGradients, MergedChunk, TokenScores};
use firebrick_models::weights::Weights;
use firebrick_objectives::value::ValueLoss;
use firebrick_objectives::{Loss, LossSums, Metric, Reduction, Scores, TokenInputs, TokenLoss};

/// The loss of a head's rows.
#[derive(Clone, Copy)]
pub enum HeadLoss<'l> {
    /// A loss of a language model's log-probs and entropies.
    Tokens(&'l dyn TokenLoss),
    /// The loss of a critic's values.
    Values(ValueLoss),
    /// Both, of a policy with a value head beside its projection: tokens + coefficient · values.
    Joint {
        /// The policy's.
        tokens: &'l dyn TokenLoss,
        /// The critic's.
        values: ValueLoss,
        /// Its weight (TRL's `vf_coef`).
        coefficient: f64,
    },
}

impl<'l, L: TokenLoss> From<&'l L> for HeadLoss<'l> {
    fn from(loss: &'l L) -> Self {
        Self::Tokens(loss)
    }
}

impl<'l> From<&'l dyn TokenLoss> for HeadLoss<'l> {
    fn from(loss: &'l dyn TokenLoss) -> Self {
        Self::Tokens(loss)
    }
}

impl From<ValueLoss> for HeadLoss<'_> {
    fn from(loss: ValueLoss) -> Self {
        Self::Values(loss)
    }
}

/// A chunk of rows with its scores, and what its gradient needs: of one rank that has the whole vocabulary, or of several
/// that share it.
pub(super) enum TokenChunk<'h> {
    /// With all logits.
    Whole(Box<HeadChunk<'h>>),
    /// With those of this rank's tokens.
    Shared(Box<MergedChunk<'h>>),
}

impl<'h> TokenChunk<'h> {
    /// Scores hidden rows `[rows, hidden]` at their targets `[rows]`. `recomputes`: see [`Head::chunk`]. Ranks that share
    /// the vocabulary exchange one message.
    pub fn score(
        head: &'h Head<'_>,
        hidden: Tensor<2>,
        targets: Tensor<1, Int>,
        temperature: f64,
        recomputes: bool,
        runtime: &Runtime,
    ) -> Result<Self> {
        if head.local_tokens().is_none() {
            let chunk = head.chunk(hidden, targets, temperature, recomputes);
            return Ok(Self::Whole(Box::new(chunk)));
        }
        let part = head.part(hidden, targets, temperature);
        let statistics = gather(part.statistics(), runtime)?;
        Ok(Self::Shared(Box::new(part.merged(&statistics))))
    }

    /// Its scores.
    pub fn scores(&self) -> &TokenScores {
        match self {
            Self::Whole(chunk) => &chunk.scores,
            Self::Shared(chunk) => &chunk.scores,
        }
    }

    /// Its gradients, given those of the scores, `[rows]` each, and the sum that the projection's may be added to
    /// ([`HeadChunk::backward`]). Ranks that share the vocabulary sum those of the normed rows.
    pub fn backward(
        self,
        d_logp: &Tensor<1>,
        d_entropy: Option<&Tensor<1>>,
        sum_of_projection: &mut Option<Tensor<2>>,
        runtime: &Runtime,
    ) -> Result<HeadGradients> {
        match self {
            Self::Whole(chunk) => Ok(chunk.backward(d_logp, d_entropy, sum_of_projection)),
            Self::Shared(chunk) => {
                let part = chunk.backward(d_logp, d_entropy);
                let normed = sum(part.normed.clone(), runtime)?;
                Ok(part.finish(normed))
            }
        }
    }
}

/// Head of one micro-batch in training.
pub(super) struct HeadPass<'a> {
    pub weights: &'a Weights,
    pub rows: usize,
    pub temperature: f64,
    /// True if logits in tiles are computed again for their gradient.
    pub recomputes: bool,
    /// The loss scale.
    pub loss_scale: f64,
    /// Of a search for NaN and infinite numbers.
    pub finite_check: Option<&'a FiniteCheck>,
}

/// The loss of a value head.
#[derive(Clone, Copy)]
struct ValueTerm {
    loss: ValueLoss,
    /// Totals of the loss.
    coefficient: f64,
    /// The parameter that the projection's gradient belongs to.
    projection: usize,
}

impl HeadPass<'_> {
    /// Gradient of the scored rows of `hidden`, `[scored, hidden]`; the weights' gradients go into `gradients`.
    pub fn backward(
        &self,
        at: PassContext<'_>,
        hidden: Tensor<2>,
        loss: HeadLoss<'_>,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        let (decoder, micro) = (at.decoder, at.micro);
        let whole = matches!(loss, HeadLoss::Tokens(loss) | HeadLoss::Joint { tokens: loss, .. } if !loss.separates());
        if micro.scored() == 0 {
            if whole && micro.whole.is_some() {
                at.sharding.scores(at, [Vec::new(), Vec::new()])?;
            }
            let none = hidden.narrow(0, 0, 1).zeros_like();
            return Ok((none, LossSums::default()));
        }
        let hidden = scored_rows(hidden, micro);
        let head = decoder.head_with(self.weights);
        match loss {
            HeadLoss::Tokens(loss) => self.tokens(&head, at, &hidden, loss, gradients),
            HeadLoss::Values(loss) => {
                let projection = decoder.projection_index();
                let term = ValueTerm { loss, coefficient: 1.0, projection };
                self.values(&head, at, &hidden, term, gradients)
            }
            HeadLoss::Joint { tokens, values, coefficient } => {
                let joint = head.joint_value().zip(decoder.value_index());
                let Some((value_head, index)) = joint else {
                    unreachable!("a joint loss is one of a policy with a value head")
                };
                let (d_tokens, mut sums) = self.tokens(&head, at, &hidden, tokens, gradients)?;
                let term = ValueTerm { loss: values, coefficient, projection: index };
                let (d_values, value_sums) = self.values(&value_head, at, &hidden, term, gradients)?;
                sums.join(value_sums, coefficient);
                Ok((d_tokens + d_values, sums))
            }
        }
    }

    fn tokens(
        &self,
        head: &Head<'_>,
        at: PassContext<'_>,
        hidden: &Tensor<2>,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        if !loss.separates() {
            return self.two_passes(head, at, hidden, loss, gradients);
        }
        self.by_chunks(at.micro, |start, len| {
            let chunk = self.chunk(head, at, hidden, (start, len), self.recomputes)?;
            let scores = chunk.scores();
            let inputs = at.micro.inputs.narrow(start, len);
            let derivatives = differentiate(loss, &scores.logp, &scores.entropy, &inputs, self.loss_scale);
            let d_entropy = derivatives.d_entropy.as_ref();
            let d_hidden = absorb(at, chunk, &derivatives.d_logp, d_entropy, gradients)?;
            Ok((d_hidden, derivatives.loss))
        })
    }

    /// The gradient of the value loss.
    fn values(
        &self,
        head: &Head<'_>,
        at: PassContext<'_>,
        hidden: &Tensor<2>,
        term: ValueTerm,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        self.by_chunks(at.micro, |start, len| {
            let chunk = head.value_chunk(hidden.clone().narrow(0, start, len));
            if let Some(check) = self.finite_check {
                check.device(chunk.values.clone().unsqueeze(), || "values".to_owned())?;
            }
            let values = chunk.values.clone().autodiff().require_grad();
            let loss = term.loss.loss(&values, &at.micro.inputs.narrow(start, len));
            let mut tape = loss.total.backward();
            let d_values = values.grad_remove(&mut tape).unwrap_or_else(|| chunk.values.zeros_like());
            let d_values = scaled(d_values, self.loss_scale * term.coefficient);
            let d_hidden = add(at, chunk.backward(d_values), term.projection, gradients);
            Ok((d_hidden, loss))
        })
    }

    /// One pass over the chunks of a loss that separates: each gives the gradient of its rows and its loss.
    fn by_chunks(
        &self,
        micro: &MicroBatch,
        mut chunk: impl FnMut(usize, usize) -> Result<(Tensor<2>, Loss)>,
    ) -> Result<(Tensor<2>, LossSums)> {
        let mut d_hidden = Vec::new();
        let mut sums = LossAccumulator::default();
        for (start, len) in chunks(micro.scored(), self.rows) {
            let (d, loss) = chunk(start, len)?;
            d_hidden.push(d);
            sums.add(loss);
        }
        let sums = sums.read(micro.scored(), micro.begun())?;
        Ok((Tensor::cat(d_hidden, 0), sums))
    }

    fn two_passes(
        &self,
        head: &Head<'_>,
        at: PassContext<'_>,
        hidden: &Tensor<2>,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        let micro = at.micro;
        let (mut logp, mut entropy) = (Vec::new(), Vec::new());
        for (start, len) in chunks(micro.scored(), self.rows) {
            let chunk = self.chunk(head, at, hidden, (start, len), true)?;
            logp.push(chunk.scores().logp.clone());
            entropy.push(chunk.scores().entropy.clone());
        }
        let [logp, entropy] = at.sharding.scores(at, [logp, entropy])?;
        // every rank has the whole loss, and each differentiates its tokens' part of it
        let whole = micro.whole.as_ref();
        let (inputs, before) = whole.map_or((&micro.inputs, 0), |whole| (&whole.inputs, whole.before));
        let derivatives = differentiate(loss, &logp, &entropy, inputs, self.loss_scale);
        let mut d_hidden = Vec::new();
        for (start, len) in chunks(micro.scored(), self.rows) {
            let chunk = self.chunk(head, at, hidden, (start, len), self.recomputes)?;
            let d_logp = derivatives.d_logp.clone().narrow(0, before + start, len);
            let d_entropy = derivatives.d_entropy.as_ref().map(|d| d.clone().narrow(0, before + start, len));
            d_hidden.push(absorb(at, chunk, &d_logp, d_entropy.as_ref(), gradients)?);
        }
        let d_hidden = Tensor::cat(d_hidden, 0);
        let (tokens, sequences) = match whole {
            // the rank of the first scored token tells of the loss of all
            Some(_) if before > 0 => return Ok((d_hidden, LossSums::default())),
            Some(whole) => (whole.scored(), whole.sequences()),
            None => (micro.scored(), micro.begun()),
        };
        let mut sums = LossAccumulator::default();
        sums.add(derivatives.loss);
        Ok((d_hidden, sums.read(tokens, sequences)?))
    }

    fn chunk<'h>(
        &self,
        head: &'h Head<'_>,
        at: PassContext<'_>,
        hidden: &Tensor<2>,
        (start, len): (usize, usize),
        recomputes: bool,
    ) -> Result<TokenChunk<'h>> {
        let rows = hidden.clone().narrow(0, start, len);
        let targets = at.micro.targets.clone().narrow(0, start, len);
        let chunk = TokenChunk::score(head, rows, targets, self.temperature, recomputes, at.runtime)?;
        if let Some(check) = self.finite_check {
            check.device(chunk.scores().logp.clone().unsqueeze(), || "log-probs".to_owned())?;
        }
        Ok(chunk)
    }
}

/// The chunk's gradient: that of its rows is returned, those of the weights are added up.
fn absorb(
    at: PassContext<'_>,
    chunk: TokenChunk<'_>,
    d_logp: &Tensor<1>,
    d_entropy: Option<&Tensor<1>>,
    gradients: &mut Gradients,
) -> Result<Tensor<2>> {
    let projection = at.decoder.projection_index();
    let mut sum = gradients.lend(projection);
    let mut head_gradients = chunk.backward(d_logp, d_entropy, &mut sum, at.runtime)?;
    gradients.put_back(projection, sum);
    let gradient = head_gradients.projection.take();
    head_gradients.projection = gradient.map(|gradient| at.decoder.projection_gradient(gradient));
    Ok(add(at, head_gradients, projection, gradients))
}

/// Adds up a chunk's gradients of weights and gives that of its rows.
fn add(at: PassContext<'_>, chunk: HeadGradients, projection: usize, gradients: &mut Gradients) -> Tensor<2> {
    // the chunk's gradient of the projection beside the one that it is added to
    at.runtime.raise_peak();
    let units = at.decoder.units();
    let norm = units[units.len() - 1].range.start;
    for (index, gradient) in [(norm, chunk.norm), (projection, chunk.projection), (projection + 1, chunk.bias)] {
        if let Some(gradient) = gradient {
            gradients.add(index, gradient);
        }
    }
    chunk.hidden
}

/// The scored rows of a micro-batch, `[scored, hidden]`; if there are none, rows that nobody reads.
pub(super) fn scored_rows(hidden: Tensor<2>, micro: &MicroBatch) -> Tensor<2> {
    if micro.scored() == 0 {
        return hidden;
    }
    hidden.select(0, micro.rows.clone())
}

/// A loss and its gradient with respect to the scores, the latter times the loss scale.
struct Differentiated {
    loss: Loss,
    d_logp: Tensor<1>,
    d_entropy: Option<Tensor<1>>,
}

fn differentiate(
    loss: &dyn TokenLoss,
    logp: &Tensor<1>,
    entropy: &Tensor<1>,
    inputs: &TokenInputs,
    loss_scale: f64,
) -> Differentiated {
    let scores =
        Scores { logp: logp.clone().autodiff().require_grad(), entropy: entropy.clone().autodiff().require_grad() };
    let loss = loss.loss(&scores, inputs);
    let mut tape = loss.total.backward();
    let d_logp = scores.logp.grad_remove(&mut tape);
    let d_entropy = scores.entropy.grad_remove(&mut tape);
    Differentiated {
        d_logp: scaled(d_logp.unwrap_or_else(|| logp.zeros_like()), loss_scale),
        d_entropy: d_entropy.map(|d| scaled(d, loss_scale)),
        loss,
    }
}

/// A gradient of the scores under a loss scale.
fn scaled(gradient: Tensor<1>, loss_scale: f64) -> Tensor<1> {
    if (loss_scale - 1.0).abs() < f64::EPSILON { gradient } else { gradient * loss_scale }
}

/// Start and length of each chunk.
pub(super) fn chunks(rows: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(size).map(move |start| (start, size.min(rows - start)))
}

/// Sums on the device while a micro-batch's chunks add to them.
#[derive(Default)]
struct LossAccumulator(Option<(Vec<Metric>, Tensor<1>)>);

impl LossAccumulator {
    /// Adds the sums of a chunk, without waiting for the device.
    fn add(&mut self, loss: Loss) {
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
    fn read(self, tokens: usize, sequences: usize) -> Result<LossSums> {
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
