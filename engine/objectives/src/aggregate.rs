//! Token weights: mask and normaliser in one number, fixed for the whole optimizer step before the first backward.
//!
//! Dividing inside a micro-batch instead makes the loss depend on how the batch was cut (verl #7200).

use crate::traits::OptimizerStep;
use serde::{Deserialize, Serialize};

/// How the token losses L of an optimizer step are reduced to one (verl's `loss_agg_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggMode {
    /// ΣL / tokens (DAPO).
    TokenMean,
    /// Mean over sequences of sums.
    SeqMeanTokenSum,
    /// Mean over sequences of means (GRPO's paper).
    SeqMeanTokenMean,
    /// ΣL / `loss_scale_factor` (Dr. GRPO).
    SeqMeanTokenSumNorm,
}

/// Aggregation of an optimizer step's token losses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Aggregation {
    /// Reduction to one loss.
    pub mode: LossAggMode,
    /// Divisor of `seq-mean-token-sum-norm`; by default sequences · longest possible completion (Dr. GRPO, TRL).
    pub scale: Option<f64>,
}

impl From<LossAggMode> for Aggregation {
    fn from(mode: LossAggMode) -> Self {
        Self { mode, scale: None }
    }
}

impl Aggregation {
    /// Weight of every scored token of an optimizer step: `lengths` are the scored tokens of each of its sequences,
    /// `max_length` is the longest possible completion.
    pub fn weights(self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
        let by = Denominators::new(lengths, max_length);
        let scale = self.scale.unwrap_or(by.sequences * by.scale);
        token_weights(self.mode, lengths, Denominators { scale, ..by })
    }
}

impl OptimizerStep<'_> {
    /// Sets the weight of every scored token: how the losses of the step's tokens become one number.
    pub fn set_weights(&mut self, aggregation: impl Into<Aggregation>) {
        let lengths: Vec<usize> = self.sequences.iter().map(|s| s.positions.len()).collect();
        let weights = aggregation.into().weights(&lengths, self.max_length);
        for (sequence, weights) in self.sequences.iter_mut().zip(weights) {
            sequence.columns.weight = Some(weights);
        }
    }
}

/// Divisors of token losses, counted over one whole optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Denominators {
    /// Scored tokens: `token-mean` (verl's `batch_num_tokens`, TRL's `num_items_in_batch`).
    pub tokens: f64,
    /// Sequences: `seq-mean-token-sum` and `seq-mean-token-mean` (verl's `global_batch_size`).
    pub sequences: f64,
    /// Divisor of `seq-mean-token-sum-norm` (verl's `loss_scale_factor`).
    pub scale: f64,
}

impl Denominators {
    /// verl's, and the default: a sequence without scored tokens does not count; the scale is the longest possible
    /// completion.
    pub fn new(lengths: &[usize], max_length: usize) -> Self {
        Self {
            tokens: lengths.iter().sum::<usize>().max(1) as f64,
            sequences: lengths.iter().filter(|&&n| n > 0).count().max(1) as f64,
            scale: max_length.max(1) as f64,
        }
    }

    /// TRL's: every sequence counts, and `dr_grpo`'s scale is sequences · longest completion.
    pub fn trl(lengths: &[usize], max_length: usize) -> Self {
        let sequences = lengths.len().max(1) as f64;
        Self { sequences, scale: sequences * max_length.max(1) as f64, ..Self::new(lengths, max_length) }
    }

    /// The denominators of a step of `micro_batches` micro-batches with the same counts as this one.
    ///
    /// This reproduces TRL's `bnpo`, a mean over the micro-batch's own tokens, which makes the loss depend on how the
    /// batch was cut. **For comparison with TRL only**: no configuration uses it.
    #[must_use]
    pub fn repeated(self, micro_batches: usize) -> Self {
        let n = micro_batches as f64;
        Self { tokens: self.tokens * n, sequences: self.sequences * n, scale: self.scale * n }
    }
}

/// Weight of every scored token; `lengths` are the numbers of scored tokens of each sequence.
pub fn token_weights(mode: LossAggMode, lengths: &[usize], by: Denominators) -> Vec<Vec<f64>> {
    lengths
        .iter()
        .map(|&n| {
            let denominator = match mode {
                LossAggMode::TokenMean => by.tokens,
                LossAggMode::SeqMeanTokenSum => by.sequences,
                LossAggMode::SeqMeanTokenMean => by.sequences * n.max(1) as f64,
                LossAggMode::SeqMeanTokenSumNorm => by.scale,
            };
            vec![denominator.recip(); n]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_weighs_tokens_as_its_formula_says() {
        let lengths = [2, 0, 4];
        let by = |mode, by| token_weights(mode, &lengths, by);
        let w = |mode| by(mode, Denominators::new(&lengths, 8));
        let close = |a: f64, b: f64| (a - b).abs() < 1e-15;
        assert!(close(w(LossAggMode::TokenMean)[0][0], 1.0 / 6.0));
        assert!(close(w(LossAggMode::SeqMeanTokenSum)[2][3], 1.0 / 2.0));
        assert!(close(w(LossAggMode::SeqMeanTokenMean)[2][0], 1.0 / 8.0));
        assert!(close(w(LossAggMode::SeqMeanTokenSumNorm)[0][1], 1.0 / 8.0));
        assert!(w(LossAggMode::TokenMean)[1].is_empty());

        let w = |mode| by(mode, Denominators::trl(&lengths, 8).repeated(2));
        assert!(close(w(LossAggMode::TokenMean)[0][0], 1.0 / 12.0));
        assert!(close(w(LossAggMode::SeqMeanTokenMean)[2][0], 1.0 / 24.0));
        assert!(close(w(LossAggMode::SeqMeanTokenSumNorm)[0][1], 1.0 / 48.0));

        let norm = |scale| Aggregation { mode: LossAggMode::SeqMeanTokenSumNorm, scale }.weights(&lengths, 8)[0][0];
        assert!(close(norm(None), 1.0 / 16.0) && close(norm(Some(5.0)), 1.0 / 5.0));
    }
}
