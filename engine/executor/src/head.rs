//! The head and the loss, a chunk of rows at a time: each chunk's logits live for its own loss and gradient only.
//!
//! Losses that separate over tokens need one pass. Losses that look at whole sequences get all log-probs from a pass
//! without gradients first, are differentiated on those vectors, and the chunks run a second time with the result.

use super::token_chunk::TokenChunk;
use crate::batch::{MicroBatch, Whole};
use crate::{Gradients, Runtime};
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_backends::PrecisionExt;
use firebrick_core::Result;
use firebrick_core::error::device_error;
use firebrick_models::Decoder;
use firebrick_models::head::{Head, HeadGradients};
use firebrick_models::weights::Weights;
use firebrick_objectives::value::ValueLoss;
use firebrick_objectives::{Loss, LossAccumulator, LossSums, Scores, TokenInputs, TokenLoss};

/// What a head's rows are differentiated by.
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

/// Head of one micro-batch in training.
pub(super) struct HeadPass<'a> {
    pub decoder: &'a Decoder,
    pub weights: &'a Weights,
    pub rows: usize,
    pub temperature: f64,
    /// What the loss is multiplied by before its gradients are taken.
    pub loss_scale: f64,
    /// Reads memory at each chunk.
    pub runtime: &'a Runtime,
}

/// The loss of a value head.
#[derive(Clone, Copy)]
struct ValueTerm {
    loss: ValueLoss,
    /// What the loss counts in the whole.
    coefficient: f64,
    /// The parameter that the projection's gradient belongs to.
    projection: usize,
}

impl HeadPass<'_> {
    /// Gradient of the scored rows of `hidden`, `[scored, hidden]`; the weights' gradients go into `gradients`.
    pub fn backward(
        &self,
        micro: &MicroBatch,
        hidden: Tensor<2>,
        loss: HeadLoss<'_>,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        let whole = matches!(loss, HeadLoss::Tokens(loss) | HeadLoss::Joint { tokens: loss, .. } if !loss.separates());
        if micro.scored() == 0 {
            if whole && micro.whole.is_some() {
                self.share_scores(micro, Vec::new(), Vec::new())?;
            }
            let none = hidden.narrow(0, 0, 1).zeros_like();
            return Ok((none, LossSums::default()));
        }
        let hidden = scored_rows(hidden, micro);
        let head = self.decoder.head_with(self.weights);
        match loss {
            HeadLoss::Tokens(loss) => self.tokens(&head, micro, &hidden, loss, gradients),
            HeadLoss::Values(loss) => {
                let projection = self.decoder.projection_index();
                let term = ValueTerm { loss, coefficient: 1.0, projection };
                self.values(&head, micro, &hidden, term, gradients)
            }
            HeadLoss::Joint { tokens, values, coefficient } => {
                let both = head.joint_value().zip(self.decoder.value_index());
                let Some((value_head, index)) = both else {
                    unreachable!("a joint loss is one of a policy with a value head")
                };
                let (d_tokens, mut sums) = self.tokens(&head, micro, &hidden, tokens, gradients)?;
                let term = ValueTerm { loss: values, coefficient, projection: index };
                let (d_values, own) = self.values(&value_head, micro, &hidden, term, gradients)?;
                sums.join(own, coefficient);
                Ok((d_tokens + d_values, sums))
            }
        }
    }

    fn tokens(
        &self,
        head: &Head<'_>,
        micro: &MicroBatch,
        hidden: &Tensor<2>,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        if !loss.separates() {
            return self.two_passes(head, micro, hidden, loss, gradients);
        }
        self.by_chunks(micro, |start, len| {
            let chunk = self.chunk(head, micro, hidden, start, len)?;
            let scores = chunk.scores();
            let inputs = micro.inputs.narrow(start, len);
            let found = differentiate(loss, &scores.logp, &scores.entropy, &inputs, self.loss_scale);
            let d_entropy = found.d_entropy.as_ref();
            let d_hidden = self.absorb(chunk, &found.d_logp, d_entropy, gradients)?;
            Ok((d_hidden, found.loss))
        })
    }

    /// The gradient of the value loss.
    fn values(
        &self,
        head: &Head<'_>,
        micro: &MicroBatch,
        hidden: &Tensor<2>,
        term: ValueTerm,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        self.by_chunks(micro, |start, len| {
            let chunk = head.value_chunk(hidden.clone().narrow(0, start, len));
            let values = chunk.values.clone().autodiff().require_grad();
            let loss = term.loss.loss(&values, &micro.inputs.narrow(start, len));
            let mut tape = loss.total.backward();
            let d_values = values.grad_remove(&mut tape);
            let d_values = d_values.unwrap_or_else(|| chunk.values.zeros_like());
            let d_values = scaled(d_values, self.loss_scale * term.coefficient);
            let d_hidden = self.add(chunk.backward(d_values), term.projection, gradients);
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

    /// The log-probs and entropies of all scored tokens of a micro-batch whose sequences ranks share, where this one
    /// has these.
    fn share_scores(
        &self,
        micro: &MicroBatch,
        logp: Vec<Tensor<1>>,
        entropy: Vec<Tensor<1>>,
    ) -> Result<(Tensor<1>, Tensor<1>)> {
        let read = |chunk: Tensor<1>| chunk.try_into_vec_as::<f64>().map_err(|e| device_error("reading log-probs", &e));
        let values = |column: Vec<Tensor<1>>| column.into_iter().map(read).collect::<Result<Vec<_>>>();
        let own = [values(logp)?.concat(), values(entropy)?.concat()];
        let mut all = [Vec::new(), Vec::new()];
        for parts in self.runtime.world().sequence_ranks().gather::<[Vec<f64>; 2]>(&own)? {
            all.iter_mut().zip(parts).for_each(|(column, part)| column.extend(part));
        }
        let device = self.decoder.device();
        let dtype = match self.decoder.arch().precision.dtype(device) {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let scored = micro.whole.as_ref().map_or(0, Whole::scored);
        let [logp, entropy] = all.map(|values| {
            assert_eq!(values.len(), scored, "a score a scored token");
            Tensor::<1>::from_data(TensorData::new(values, [scored]), (device, dtype))
        });
        Ok((logp, entropy))
    }

    fn two_passes(
        &self,
        head: &Head<'_>,
        micro: &MicroBatch,
        hidden: &Tensor<2>,
        loss: &dyn TokenLoss,
        gradients: &mut Gradients,
    ) -> Result<(Tensor<2>, LossSums)> {
        let (mut logp, mut entropy) = (Vec::new(), Vec::new());
        for (start, len) in chunks(micro.scored(), self.rows) {
            let chunk = self.chunk(head, micro, hidden, start, len)?;
            logp.push(chunk.scores().logp.clone());
            entropy.push(chunk.scores().entropy.clone());
        }
        let (scores, inputs, before) = match &micro.whole {
            // every rank has the whole loss, and each differentiates its own tokens' part of it
            Some(whole) => (self.share_scores(micro, logp, entropy)?, &whole.inputs, whole.before),
            None => ((Tensor::cat(logp, 0), Tensor::cat(entropy, 0)), &micro.inputs, 0),
        };
        let (logp, entropy) = scores;
        let found = differentiate(loss, &logp, &entropy, inputs, self.loss_scale);
        let mut d_hidden = Vec::new();
        for (start, len) in chunks(micro.scored(), self.rows) {
            let chunk = self.chunk(head, micro, hidden, start, len)?;
            let d_logp = found.d_logp.clone().narrow(0, before + start, len);
            let d_entropy = found.d_entropy.as_ref();
            let d_entropy = d_entropy.map(|d| d.clone().narrow(0, before + start, len));
            d_hidden.push(self.absorb(chunk, &d_logp, d_entropy.as_ref(), gradients)?);
        }
        let d_hidden = Tensor::cat(d_hidden, 0);
        let (tokens, sequences) = match &micro.whole {
            // the rank of the first scored token tells of the loss of all
            Some(_) if before > 0 => return Ok((d_hidden, LossSums::default())),
            Some(whole) => (whole.scored(), whole.sequences()),
            None => (micro.scored(), micro.begun()),
        };
        let mut sums = LossAccumulator::default();
        sums.add(found.loss);
        Ok((d_hidden, sums.read(tokens, sequences)?))
    }

    fn chunk<'h>(
        &self,
        head: &'h Head<'_>,
        micro: &MicroBatch,
        hidden: &Tensor<2>,
        start: usize,
        len: usize,
    ) -> Result<TokenChunk<'h>> {
        let rows = hidden.clone().narrow(0, start, len);
        let targets = micro.targets.clone().narrow(0, start, len);
        TokenChunk::score(head, rows, targets, self.temperature, self.runtime)
    }

    /// The chunk's gradient: that of its rows is returned, those of the weights are added up.
    fn absorb(
        &self,
        chunk: TokenChunk<'_>,
        d_logp: &Tensor<1>,
        d_entropy: Option<&Tensor<1>>,
        gradients: &mut Gradients,
    ) -> Result<Tensor<2>> {
        let projection = self.decoder.projection_index();
        let mut found = chunk.backward(d_logp, d_entropy, self.runtime)?;
        let own = found.projection.take();
        found.projection = own.map(|own| self.decoder.projection_gradient(own));
        Ok(self.add(found, projection, gradients))
    }

    /// Adds up a chunk's gradients of weights and gives that of its rows.
    fn add(&self, chunk: HeadGradients, projection: usize, gradients: &mut Gradients) -> Tensor<2> {
        // the chunk's gradient of the projection beside the one that it is added to
        self.runtime.raise_peak();
        let units = self.decoder.units();
        let norm = units[units.len() - 1].range.start;
        for (index, gradient) in [(norm, chunk.norm), (projection, chunk.projection), (projection + 1, chunk.bias)] {
            if let Some(gradient) = gradient {
                gradients.add(index, gradient);
            }
        }
        chunk.hidden
    }
}

/// The scored rows of a micro-batch, `[scored, hidden]`; where there are none, rows that nobody reads.
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
