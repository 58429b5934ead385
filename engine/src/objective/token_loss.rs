//! Per-token losses: their inputs, their results, and the trait [`TokenLoss`].

use burn::tensor::Tensor;

/// Scores of the tokens of a chunk as leaves of a graph, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct Scores {
    /// Log-probability of the token under the current policy at the training temperature.
    pub logp: Tensor<1>,
    /// Entropy of the distribution it was drawn from.
    pub entropy: Tensor<1>,
}

/// The other inputs of the same tokens, `[tokens]` each, detached.
#[derive(Clone, Debug)]
pub struct TokenInputs {
    /// Mask and normaliser in one: the loss is the sum of weight · per-token loss.
    pub weight: Tensor<1>,
    /// Advantage.
    pub advantage: Tensor<1>,
    /// Log-prob under the policy that the update starts from; the current one's own (detached) where absent.
    pub old_logp: Option<Tensor<1>>,
    /// Log-prob under the reference policy.
    pub ref_logp: Option<Tensor<1>>,
    /// Log-prob under the distribution that the token was drawn from, for losses that look at it.
    pub sampler_logp: Option<Tensor<1>>,
    /// Importance-sampling correction of the policy loss only; 1 where absent.
    pub correction: Option<Tensor<1>>,
    /// 1 for tokens that the policy loss keeps, 0 for the others; all are kept where absent.
    pub keep: Option<Tensor<1>>,
    /// 1 for tokens that the objective has chosen out of the whole optimizer step; none where absent.
    pub chosen: Option<Tensor<1>>,
    /// Weight of the token's entropy in the loss, with the coefficient included; no bonus where absent.
    pub bonus: Option<Tensor<1>>,
    /// Tokens of each sequence, in order; empty for a chunk, which may begin and end inside one.
    pub lengths: Vec<usize>,
}

impl TokenInputs {
    /// Whole sequences with a weight and an advantage for each token, and no other inputs.
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

/// How a metric's numbers of chunks and micro-batches become its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum over an optimizer step: it was weighted like the loss.
    Sum,
    /// The mean over scored tokens.
    TokenMean,
    /// The mean over sequences that have scored tokens. Of losses that look at whole sequences.
    SequenceMean,
    /// The minimum over sequences or tokens.
    Min,
    /// The maximum over sequences or tokens.
    Max,
}

impl Reduction {
    /// Two micro-batches' numbers as one.
    #[must_use]
    pub fn combine(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Sum | Self::TokenMean | Self::SequenceMean => a + b,
            Self::Min => a.min(b),
            Self::Max => a.max(b),
        }
    }

    /// The value of a number that is combined over so many tokens and sequences.
    #[must_use]
    pub fn value(self, combined: f64, tokens: usize, sequences: usize) -> f64 {
        match self {
            Self::Sum | Self::Min | Self::Max => combined,
            Self::TokenMean => combined / tokens.max(1) as f64,
            Self::SequenceMean => combined / sequences.max(1) as f64,
        }
    }
}

/// A number that the loss reports, as a sum over the chunk: `[1]`.
#[derive(Clone, Debug)]
pub struct Metric {
    /// Its name, by convention verl's where verl has it.
    pub name: &'static str,
    /// How sums become the value.
    pub reduction: Reduction,
    /// Sum over the chunk; its minimum or maximum where the reduction is one.
    pub sum: Tensor<1>,
}

impl Metric {
    /// The mean of `values` over scored tokens, `[tokens]`.
    #[must_use]
    pub fn token_mean(name: &'static str, values: Tensor<1>) -> Self {
        Self {
            name,
            reduction: Reduction::TokenMean,
            sum: values.inner().sum(),
        }
    }

    /// The sum of `values` over an optimizer step, `[tokens]`; they are weighted like the loss.
    #[must_use]
    pub fn weighted_sum(name: &'static str, values: Tensor<1>) -> Self {
        Self {
            name,
            reduction: Reduction::Sum,
            sum: values.inner().sum(),
        }
    }
}

/// Loss of a chunk.
#[derive(Clone, Debug)]
pub struct Loss {
    /// `[1]`, part of the graph.
    pub total: Tensor<1>,
    /// What to report, detached.
    pub metrics: Vec<Metric>,
}

/// A per-token loss. Its token weights are fixed before the first backward, so chunks and micro-batches add up to the same loss
/// however the batch was cut.
pub trait TokenLoss {
    /// The loss of a chunk; of whole sequences where it does not separate over tokens.
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss;

    /// Whether the loss is a sum of independent terms, one a token, so that any chunk can be differentiated by itself. A loss
    /// that looks at whole sequences returns `false`: it is called with one micro-batch at a time, and finds the sequences in
    /// [`TokenInputs::lengths`].
    fn separates(&self) -> bool {
        true
    }
}
