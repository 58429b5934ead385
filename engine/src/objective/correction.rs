//! Tokens are drawn by a sampler whose log-probs are not quite the trainer's. Corrections weigh the difference (truncated
//! importance sampling; verl's `rollout_correction`, TRL's `vllm_importance_sampling_mode`); what differs too much is
//! [left out](super::rejection).

use super::advantage::mean;
use super::config::ObjectiveConfig;
use serde::{Deserialize, Serialize};

/// Exponents are held within ± this.
const BOUND: f64 = 20.0;

/// How the policy term is corrected by `w = exp(old − sampler)` (TRL's names; verl's `token` and `sequence` truncate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutIs {
    /// A weight a token, bounded by the thresholds.
    #[serde(alias = "token")]
    TokenTruncate,
    /// A weight a token, 0 outside the thresholds.
    TokenMask,
    /// The product over the sequence, bounded by the thresholds.
    #[serde(alias = "sequence")]
    SequenceTruncate,
    /// The product over the sequence, 0 outside the thresholds.
    SequenceMask,
}

impl RolloutIs {
    /// Whether a sequence has one weight.
    #[must_use]
    pub fn by_sequence(self) -> bool {
        matches!(self, Self::SequenceTruncate | Self::SequenceMask)
    }

    fn masks(self) -> bool {
        matches!(self, Self::TokenMask | Self::SequenceMask)
    }
}

impl ObjectiveConfig {
    /// Weights of the policy term by token, and what to report of them; `differences` are old − sampler of the scored
    /// tokens by sequence.
    #[must_use]
    pub fn corrections(
        &self,
        kind: RolloutIs,
        differences: &[Vec<f64>],
    ) -> (Vec<Vec<f64>>, Vec<(String, f64)>) {
        let ratios: Vec<Vec<f64>> = differences
            .iter()
            .map(|own| {
                if kind.by_sequence() {
                    let sum: f64 = own.iter().sum();
                    return vec![sum.clamp(-BOUND, BOUND).exp(); own.len()];
                }
                own.iter().map(|d| d.clamp(-BOUND, BOUND).exp()).collect()
            })
            .collect();
        let (lower, upper) = (
            self.rollout_is_threshold_lower.unwrap_or(0.0),
            self.rollout_is_threshold,
        );
        let bounded = |ratio: &f64| match kind.masks() {
            true if (lower..=upper).contains(ratio) => *ratio,
            true => 0.0,
            false => ratio.clamp(lower, upper),
        };
        let mut weights: Vec<Vec<f64>> = ratios
            .iter()
            .map(|own| own.iter().map(bounded).collect())
            .collect();
        let mut metrics = self.report(&ratios);
        if self.rollout_is_batch_normalize {
            let centre = if kind.by_sequence() {
                mean(&firsts(&weights))
            } else {
                mean(&weights.concat())
            };
            let factor = if centre > 1e-8 { centre } else { 1.0 };
            weights.iter_mut().flatten().for_each(|w| *w /= factor);
            metrics.push(("rollout_corr/rollout_is_batch_norm_factor".into(), factor));
        }
        (weights, metrics)
    }

    /// verl's metrics of the ratios before they are bounded, and the effective sample size of the bounded ones.
    fn report(&self, ratios: &[Vec<f64>]) -> Vec<(String, f64)> {
        let all = ratios.concat();
        if all.is_empty() {
            return Vec::new();
        }
        let upper = self.rollout_is_threshold;
        let share = |test: &dyn Fn(f64) -> bool| {
            all.iter().filter(|r| test(**r)).count() as f64 / all.len() as f64
        };
        let held: Vec<f64> = all.iter().map(|r| r.clamp(1.0 / upper, upper)).collect();
        let centre = mean(&held);
        let squares: Vec<f64> = held.iter().map(|r| (r / centre).powi(2)).collect();
        let variance = mean(&squares) * centre * centre - centre * centre;
        [
            ("mean", mean(&all)),
            ("max", all.iter().copied().fold(f64::MIN, f64::max)),
            ("min", all.iter().copied().fold(f64::MAX, f64::min)),
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
    rows.iter().filter_map(|own| own.first().copied()).collect()
}

#[cfg(test)]
mod tests {
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
        let config = ObjectiveConfig {
            rollout_is_threshold_lower: Some(0.5),
            ..ObjectiveConfig::default()
        };
        let weights = |kind| config.corrections(kind, &differences).0;
        close(&weights(RolloutIs::TokenTruncate), &[&[2.0, 1.0], &[0.5]]);
        close(&weights(RolloutIs::TokenMask), &[&[0.0, 1.0], &[0.0]]);
        close(
            &weights(RolloutIs::SequenceTruncate),
            &[&[2.0, 2.0], &[0.5]],
        );
        close(&weights(RolloutIs::SequenceMask), &[&[0.0, 0.0], &[0.0]]);
        let normal = ObjectiveConfig {
            rollout_is_batch_normalize: true,
            ..config
        };
        let (weights, metrics) = normal.corrections(RolloutIs::SequenceTruncate, &differences);
        close(&weights, &[&[1.6, 1.6], &[0.4]]);
        let factor = metrics.last().expect("a metric");
        assert!(factor.0.ends_with("batch_norm_factor") && (factor.1 - 1.25).abs() < 1e-12);
    }
}
