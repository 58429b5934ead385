//! Per-token losses: their inputs, their results, and the trait [`TokenLoss`].

use burn::tensor::Tensor;
use firebrick_core::sequence::TokenColumns;
use serde::{Deserialize, Serialize};

/// Scores of the tokens of a chunk as leaves of a graph, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct Scores {
    /// Log-probability of the token under the current policy at the training temperature, in nats.
    pub logp: Tensor<1>,
    /// Entropy of the distribution it was drawn from, in nats.
    pub entropy: Tensor<1>,
}

/// Inputs of the same tokens, without graph.
#[derive(Clone, Debug)]
pub struct TokenInputs {
    /// Columns, `[tokens]` each.
    pub columns: TokenColumns<Tensor<1>>,
    /// Tokens of each sequence, in order; empty for a chunk, which may begin and end inside one.
    pub lengths: Vec<usize>,
}

impl TokenInputs {
    /// Tokens of whole sequences with a weight and an advantage, and nothing else known of them. Both are `[tokens]`.
    pub fn new(weight: Tensor<1>, advantage: Tensor<1>, lengths: Vec<usize>) -> Self {
        let columns = TokenColumns { weight: Some(weight), advantage: Some(advantage), ..TokenColumns::default() };
        Self { columns, lengths }
    }

    /// Weights of the tokens in the loss. They are `[tokens]`.
    ///
    /// # Panics
    /// If the sequences were given none.
    pub fn weight(&self) -> Tensor<1> {
        let weight = self.columns.weight.clone();
        weight.expect("scored tokens have a weight before a loss is computed")
    }

    /// Advantages of the tokens: 0 where nothing computed any. They are `[tokens]`.
    pub fn advantage(&self) -> Tensor<1> {
        let advantage = self.columns.advantage.clone();
        advantage.unwrap_or_else(|| self.weight().zeros_like())
    }

    /// A chunk of the tokens.
    #[must_use]
    pub fn narrow(&self, start: usize, len: usize) -> Self {
        Self { columns: self.columns.map(|column| column.clone().narrow(0, start, len)), lengths: Vec::new() }
    }
}

/// Reduction of a metric's numbers of chunks and micro-batches to its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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
    pub fn combine(self, a: f64, b: f64) -> f64 {
        match self {
            Self::Sum | Self::TokenMean | Self::SequenceMean => a + b,
            Self::Min => a.min(b),
            Self::Max => a.max(b),
        }
    }

    /// The value of a number that is combined over so many tokens and sequences.
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
    /// Reduction of the sums to the value.
    pub reduction: Reduction,
    /// Sum over the chunk; its minimum or maximum where the reduction is one.
    pub sum: Tensor<1>,
}

impl Metric {
    /// The mean of `values` over scored tokens, `[tokens]`.
    pub fn token_mean(name: &'static str, values: Tensor<1>) -> Self {
        Self { name, reduction: Reduction::TokenMean, sum: values.inner().sum() }
    }

    /// The sum of `values` over an optimizer step, `[tokens]`; they are weighted like the loss.
    pub fn weighted_sum(name: &'static str, values: Tensor<1>) -> Self {
        Self { name, reduction: Reduction::Sum, sum: values.inner().sum() }
    }
}

/// Loss of a chunk.
#[derive(Clone, Debug)]
pub struct Loss {
    /// `[1]`, part of the graph.
    pub total: Tensor<1>,
    /// Metrics, detached.
    pub metrics: Vec<Metric>,
}

/// A per-token loss. Its token weights are fixed before the first backward, so chunks and micro-batches add up to the
/// same loss however the batch was cut.
pub trait TokenLoss {
    /// The loss of a chunk; of whole sequences where it does not separate over tokens.
    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss;

    /// Returns true if the loss is a sum of independent terms per token, so that any chunk can be differentiated alone.
    /// A loss that looks at whole sequences returns `false`: it is called with one micro-batch at a time, and finds the
    /// sequences in [`TokenInputs::lengths`].
    fn separates(&self) -> bool {
        true
    }
}
