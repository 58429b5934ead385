//! Rewards into advantages, per-token scores into a loss.
//!
//! Credit works on plain slices, losses on vectors of token scores: an objective never sees a model.

pub mod advantage;
pub mod aggregate;
pub mod gae;
pub mod grpo;
pub mod kl;
pub mod kl_controller;
pub mod policy;
pub mod sft;
pub mod value;

use crate::rollout::Rollout;
use burn::tensor::Tensor;

/// Scores of the tokens of a chunk as leaves of a graph, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct Scores {
    /// Log-probability of the token under the current policy at the training temperature.
    pub logp: Tensor<1>,
    /// Entropy of the distribution it was drawn from.
    pub entropy: Tensor<1>,
}

/// What is known of the same tokens, `[tokens]` each, without graph.
#[derive(Clone, Debug)]
pub struct TokenInputs {
    /// Mask and normaliser in one: the loss is the sum of weight · per-token loss.
    pub weight: Tensor<1>,
    /// Advantage.
    pub advantage: Tensor<1>,
    /// Log-prob under the policy that the rollouts are credited to; the current one's own (detached) where absent.
    pub old_logp: Option<Tensor<1>>,
    /// Log-prob under the reference policy.
    pub ref_logp: Option<Tensor<1>>,
    /// Tokens of each sequence, in order; empty for a chunk, which may begin and end inside one.
    pub lengths: Vec<usize>,
}

impl TokenInputs {
    /// A chunk of the tokens.
    #[must_use]
    pub fn narrow(&self, start: usize, len: usize) -> Self {
        let cut = |t: &Tensor<1>| t.clone().narrow(0, start, len);
        Self {
            weight: cut(&self.weight),
            advantage: cut(&self.advantage),
            old_logp: self.old_logp.as_ref().map(cut),
            ref_logp: self.ref_logp.as_ref().map(cut),
            lengths: Vec::new(),
        }
    }
}

/// How a metric's sums become its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// The sum over an optimizer step: it was weighted like the loss.
    Sum,
    /// The mean over scored tokens.
    TokenMean,
}

/// A number that the loss reports, as a sum over the chunk: `[1]`.
#[derive(Clone, Debug)]
pub struct Metric {
    /// verl's name.
    pub name: &'static str,
    /// How sums become the value.
    pub reduce: Reduce,
    /// Sum over the chunk.
    pub sum: Tensor<1>,
}

/// Loss of a chunk.
#[derive(Clone, Debug)]
pub struct Loss {
    /// `[1]`, part of the graph.
    pub total: Tensor<1>,
    /// What to report, off the graph.
    pub metrics: Vec<Metric>,
}

/// A per-token loss with fixed weights, so that chunks and micro-batches add up to the same loss however they were cut.
pub trait TokenLoss {
    /// The loss of a chunk; of whole sequences where it does not separate over tokens.
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss;

    /// Whether the loss is a sum over tokens of terms that know nothing of each other, so that any chunk can be
    /// differentiated by itself. A loss that looks at whole sequences says no, gets a micro-batch at a time, and finds
    /// the sequences in [`TokenInputs::lengths`].
    fn separates(&self) -> bool {
        true
    }
}

/// An algorithm: how rewards become advantages, how tokens are weighted, and the loss.
pub trait Objective: TokenLoss + Send + Sync {
    /// Fills in the advantages of a step's rollouts. Rollouts of one prompt have the same `draw`.
    fn credit(&self, rollouts: &mut [Rollout]);

    /// Weights of the tokens of one optimizer step, given each sequence's number of scored tokens.
    fn weights(&self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>>;

    /// Whether a reference policy's log-probs are needed.
    fn needs_reference(&self) -> bool;
}

pub(crate) fn token_mean(name: &'static str, values: Tensor<1>) -> Metric {
    Metric {
        name,
        reduce: Reduce::TokenMean,
        sum: values.inner().sum(),
    }
}

pub(crate) fn weighted(name: &'static str, values: Tensor<1>) -> Metric {
    Metric {
        name,
        reduce: Reduce::Sum,
        sum: values.inner().sum(),
    }
}
