//! Token weights: mask and normaliser in one number, fixed for the whole optimizer step before the first backward.
//!
//! Dividing inside a micro-batch instead makes the loss depend on how the batch was cut (verl #7200).

use serde::{Deserialize, Serialize};

/// How per-token losses of an optimizer step become one number (verl's `loss_agg_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggMode {
    /// Σ L / Σ tokens (DAPO, arXiv:2503.14476; TRL's `dapo`).
    TokenMean,
    /// Σ of each sequence's sum, over sequences.
    SeqMeanTokenSum,
    /// Mean over sequences of each sequence's mean (GRPO's paper; TRL's `grpo`).
    SeqMeanTokenMean,
    /// Σ L / (sequences · longest possible completion) (Dr. GRPO; TRL's `dr_grpo`).
    SeqMeanTokenSumNorm,
}

/// Weight of every scored token of an optimizer step, given each sequence's number of them.
///
/// Sequences without scored tokens do not count as sequences (verl's rule).
#[must_use]
pub fn token_weights(mode: LossAggMode, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
    let tokens = lengths.iter().sum::<usize>().max(1) as f64;
    let sequences = lengths.iter().filter(|&&n| n > 0).count().max(1) as f64;
    lengths
        .iter()
        .map(|&n| {
            let weight = match mode {
                LossAggMode::TokenMean => 1.0 / tokens,
                LossAggMode::SeqMeanTokenSum => 1.0 / sequences,
                LossAggMode::SeqMeanTokenMean => 1.0 / (sequences * n.max(1) as f64),
                LossAggMode::SeqMeanTokenSumNorm => 1.0 / (sequences * max_length.max(1) as f64),
            };
            vec![weight; n]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mode_weighs_tokens_as_its_formula_says() {
        let w = |mode| token_weights(mode, &[2, 0, 4], 8);
        let close = |a: f64, b: f64| (a - b).abs() < 1e-15;
        assert!(close(w(LossAggMode::TokenMean)[0][0], 1.0 / 6.0));
        assert!(close(w(LossAggMode::SeqMeanTokenSum)[2][3], 1.0 / 2.0));
        assert!(close(w(LossAggMode::SeqMeanTokenMean)[2][0], 1.0 / 8.0));
        assert!(close(w(LossAggMode::SeqMeanTokenSumNorm)[0][1], 1.0 / 16.0));
        assert!(w(LossAggMode::TokenMean)[1].is_empty());
    }
}
