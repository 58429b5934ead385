//! Importance-sampling correction: the sampler's log-probs differ slightly from the trainer's, and weights of the
//! policy loss correct for it (truncated importance sampling; verl's `rollout_correction`, TRL's
//! `vllm_importance_sampling_mode`). [Rejection](super::rejection) leaves out what differs too much.

use super::advantage::mean;
use serde::{Deserialize, Serialize};

/// Exponents are clamped to ± this.
const MAX_EXPONENT: f64 = 20.0;

/// How the policy loss is corrected by `w = exp(old − sampler)` (TRL's names; verl's `token` and `sequence` truncate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutIs {
    /// Per token, truncated to the bounds.
    #[serde(alias = "token")]
    #[schemars(extend("x-alias" = ["token"]))]
    TokenTruncate,
    /// Per token, 0 outside the bounds.
    TokenMask,
    /// Per sequence, truncated to the bounds.
    #[serde(alias = "sequence")]
    #[schemars(extend("x-alias" = ["sequence"]))]
    SequenceTruncate,
    /// Per sequence, 0 outside the bounds.
    SequenceMask,
}

/// Level of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorrectionLevel {
    /// Each token: `exp(old − sampler)`.
    Token,
    /// The sequence: the product of its tokens' ratios.
    Sequence,
}

/// Treatment of weights outside the thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorrectionBound {
    /// They become the nearest threshold.
    Truncate,
    /// They become 0.
    Mask,
}

/// Importance-sampling weights of the policy loss, `w = exp(old − sampler)` within thresholds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RolloutCorrection {
    /// Level of a weight.
    pub level: CorrectionLevel,
    /// Treatment outside the thresholds.
    pub bound: CorrectionBound,
    /// Least weight.
    pub lower: f64,
    /// Largest weight.
    pub upper: f64,
    /// True to divide weights by their mean over the step.
    pub normalize: bool,
}

impl RolloutCorrection {
    /// Weights of the policy loss by token, and their metrics; `differences` are old − sampler of the scored
    /// tokens by sequence.
    pub fn weights(&self, differences: &[Vec<f64>]) -> (Vec<Vec<f64>>, Vec<(String, f64)>) {
        let ratios: Vec<Vec<f64>> = differences
            .iter()
            .map(|row| {
                if self.level == CorrectionLevel::Sequence {
                    let sum: f64 = row.iter().sum();
                    return vec![sum.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp(); row.len()];
                }
                row.iter().map(|d| d.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()).collect()
            })
            .collect();
        let (lower, upper) = (self.lower, self.upper);
        let bounded = |ratio: &f64| match self.bound {
            CorrectionBound::Mask if (lower..=upper).contains(ratio) => *ratio,
            CorrectionBound::Mask => 0.0,
            CorrectionBound::Truncate => ratio.clamp(lower, upper),
        };
        let mut weights: Vec<Vec<f64>> = ratios.iter().map(|row| row.iter().map(bounded).collect()).collect();
        let mut metrics = self.report(&ratios);
        if self.normalize {
            let centre = match self.level {
                CorrectionLevel::Sequence => mean(&firsts(&weights)),
                CorrectionLevel::Token => mean(&weights.concat()),
            };
            let factor = if centre > 1e-8 { centre } else { 1.0 };
            weights.iter_mut().flatten().for_each(|w| *w /= factor);
            metrics.push(("rollout_corr/rollout_is_batch_norm_factor".into(), factor));
        }
        (weights, metrics)
    }

    /// verl's metrics of the ratios before they are bounded, and the effective sample size of the bounded ones.
    fn report(&self, ratios: &[Vec<f64>]) -> Vec<(String, f64)> {
        let ratios = ratios.concat();
        if ratios.is_empty() {
            return Vec::new();
        }
        let upper = self.upper;
        let share =
            |test: &dyn Fn(f64) -> bool| ratios.iter().filter(|r| test(**r)).count() as f64 / ratios.len() as f64;
        let clamped = ratios.iter().map(|r| r.max(1.0 / upper).min(upper));
        let held: Vec<f64> = clamped.collect();
        let centre = mean(&held);
        let squares: Vec<f64> = held.iter().map(|r| (r / centre).powi(2)).collect();
        let variance = mean(&squares) * centre * centre - centre * centre;
        [
            ("mean", mean(&ratios)),
            ("max", ratios.iter().copied().fold(f64::MIN, f64::max)),
            ("min", ratios.iter().copied().fold(f64::MAX, f64::min)),
            ("std", variance.max(0.0).sqrt()),
            ("ratio_fraction_high", share(&|r| r > upper)),
            ("ratio_fraction_low", share(&|r| r < 1.0 / upper)),
            ("eff_sample_size", mean(&squares).recip()),
        ]
        .into_iter()
        .map(|(name, value)| (format!("rollout_corr/rollout_is_{name}"), value))
        .collect()
    }
}

/// The first of each that has any.
fn firsts(rows: &[Vec<f64>]) -> Vec<f64> {
    rows.iter().filter_map(|row| row.first().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::CorrectionBound::{Mask, Truncate};
    use super::CorrectionLevel::{Sequence, Token};
    use super::*;

    fn close(found: &[Vec<f64>], expected: &[&[f64]]) {
        for (found, expected) in found.iter().zip(expected) {
            for (f, e) in found.iter().zip(*expected) {
                assert!((f - e).abs() < 1e-12, "{found:?} {expected:?}");
            }
        }
    }

    #[test]
    fn weights_are_bounded_or_left_out_by_token_or_by_sequence() {
        let differences = [vec![4_f64.ln(), 1_f64.ln()], vec![0.25_f64.ln()]];
        let correction = |level, bound| RolloutCorrection { level, bound, lower: 0.5, upper: 2.0, normalize: false };
        let weights = |level, bound| correction(level, bound).weights(&differences).0;
        close(&weights(Token, Truncate), &[&[2.0, 1.0], &[0.5]]);
        close(&weights(Token, Mask), &[&[0.0, 1.0], &[0.0]]);
        close(&weights(Sequence, Truncate), &[&[2.0, 2.0], &[0.5]]);
        close(&weights(Sequence, Mask), &[&[0.0, 0.0], &[0.0]]);
        let normal = RolloutCorrection { normalize: true, ..correction(Sequence, Truncate) };
        let (weights, metrics) = normal.weights(&differences);
        close(&weights, &[&[1.6, 1.6], &[0.4]]);
        let factor = metrics.last().expect("a metric");
        assert!(factor.0.ends_with("batch_norm_factor") && (factor.1 - 1.25).abs() < 1e-12);
    }
}
