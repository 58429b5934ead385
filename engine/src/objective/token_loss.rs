//! Losses of tokens: what they see, what they return, and the trait they implement.

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
    /// Log-prob under the distribution that the token was drawn from, for losses that look at it.
    pub sampler_logp: Option<Tensor<1>>,
    /// Importance-sampling correction of the policy term, and of it alone; 1 where absent.
    pub correction: Option<Tensor<1>>,
    /// 1 for tokens that the policy term keeps, 0 for the others; all are kept where absent.
    pub keep: Option<Tensor<1>>,
    /// 1 for tokens that the objective has chosen out of the whole optimizer step; none where absent.
    pub chosen: Option<Tensor<1>>,
    /// Weight of the token's entropy in the loss, the coefficient in it; no bonus where absent.
    pub bonus: Option<Tensor<1>>,
    /// Tokens of each sequence, in order; empty for a chunk, which may begin and end inside one.
    pub lengths: Vec<usize>,
}

impl TokenInputs {
    /// Tokens of whole sequences with a weight and an advantage, and nothing else known of them.
    #[must_use]
    pub fn new(weight: Tensor<1>, advantage: Tensor<1>, lengths: Vec<usize>) -> Self {
        Self {
            weight,
            advantage,
            old_logp: None,
            ref_logp: None,
            sampler_logp: None,
            correction: None,
            keep: None,
            chosen: None,
            bonus: None,
            lengths,
        }
    }

    /// A chunk of the tokens.
    #[must_use]
    pub fn narrow(&self, start: usize, len: usize) -> Self {
        let cut = |t: &Tensor<1>| t.clone().narrow(0, start, len);
        let cut_some = |t: &Option<Tensor<1>>| t.as_ref().map(cut);
        Self {
            weight: cut(&self.weight),
            advantage: cut(&self.advantage),
            old_logp: cut_some(&self.old_logp),
            ref_logp: cut_some(&self.ref_logp),
            sampler_logp: cut_some(&self.sampler_logp),
            correction: cut_some(&self.correction),
            keep: cut_some(&self.keep),
            chosen: cut_some(&self.chosen),
            bonus: cut_some(&self.bonus),
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
    /// The mean over sequences that have scored tokens. Of losses that look at whole sequences.
    SequenceMean,
    /// The least of the sequences' or tokens'.
    Least,
    /// The largest of the sequences' or tokens'.
    Largest,
}

impl Reduce {
    /// Two micro-batches' numbers as one.
    #[must_use]
    pub fn join(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Sum | Self::TokenMean | Self::SequenceMean => a + b,
            Self::Least => a.min(b),
            Self::Largest => a.max(b),
        }
    }

    /// The value of a number that is joined over so many tokens and sequences.
    #[must_use]
    pub fn value(self, joined: f64, tokens: usize, sequences: usize) -> f64 {
        match self {
            Self::Sum | Self::Least | Self::Largest => joined,
            Self::TokenMean => joined / tokens.max(1) as f64,
            Self::SequenceMean => joined / sequences.max(1) as f64,
        }
    }
}

/// A number that the loss reports, as a sum over the chunk: `[1]`.
#[derive(Clone, Debug)]
pub struct Metric {
    /// verl's name.
    pub name: &'static str,
    /// How sums become the value.
    pub reduce: Reduce,
    /// Sum over the chunk; the least or largest number where that is asked for.
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
