//! KL-Cov and Clip-Cov (arXiv:2505.22617): the few tokens with the largest covariance of log-prob and advantage reduce
//! the entropy most, so they are penalized or left out. They are chosen out of the whole optimizer step.

use super::clip::{ClipRange, clip};
use super::{PolicyTerms, Ratios, TokenPolicyLoss};
use burn::tensor::Tensor;
use firebrick_models::random::Stream;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Differences of log-probs up to this are rounding errors, whose sign must not become a gradient.
const MAX_ROUNDING_ERROR: f64 = 1e-5;

/// `−A r`, and `+ ppo_kl_coef · |logp − old|` for the chosen tokens.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct KlCov {
    /// KL-Cov: fraction of tokens that are penalized.
    #[default(0.0002)]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub kl_cov_ratio: f64,
    /// KL-Cov: penalty weight.
    #[default(1.0)]
    #[schemars(range(min = 0))]
    pub ppo_kl_coef: f64,
}

/// The clipped loss, 0 for the chosen tokens. Those are reported as clipped.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct ClipCov {
    /// Where the ratio is clipped.
    #[serde(flatten)]
    pub range: ClipRange,
    /// Clip-Cov: fraction of tokens that are excluded.
    #[default(0.0002)]
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub clip_cov_ratio: f64,
    /// Clip-Cov: smallest covariance of excluded tokens.
    #[default(1.0)]
    pub clip_cov_lb: f64,
    /// Clip-Cov: largest covariance of excluded tokens.
    #[default(5.0)]
    pub clip_cov_ub: f64,
}

impl TokenPolicyLoss for KlCov {
    fn chooses_tokens(&self) -> bool {
        true
    }

    fn ppo_kl(&self, difference: Tensor<1>) -> Tensor<1> {
        difference.abs()
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let advantage = ratios.inputs.advantage();
        let mut loss = ratios.log_ratio.clone().exp() * advantage.clone().neg();
        if let Some(chosen) = &ratios.inputs.columns.chosen {
            let apart = ratios.difference.clone().abs();
            let moved = apart.clone().inner().greater_elem(MAX_ROUNDING_ERROR).float();
            loss = loss + apart * (chosen.clone() * moved * self.ppo_kl_coef);
        }
        ratios.unclipped(loss)
    }
}

impl TokenPolicyLoss for ClipCov {
    fn chooses_tokens(&self) -> bool {
        true
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let terms = clip(self.range, None, ratios);
        let chosen = match &ratios.inputs.columns.chosen {
            Some(chosen) => chosen.clone(),
            None => terms.clipped.zeros_like(),
        };
        PolicyTerms { loss: terms.loss * (chosen.clone().neg() + 1.0), clipped: chosen, ..terms }
    }
}

/// `(A − mean A) (logp − mean logp)` of the tokens of an optimizer step.
pub fn covariances(logp: &[f64], advantages: &[f64]) -> Vec<f64> {
    let n = logp.len().max(1) as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / n;
    let (logp_mean, advantage_mean) = (mean(logp), mean(advantages));
    let pairs = logp.iter().zip(advantages);
    pairs.map(|(l, a)| (a - advantage_mean) * (l - logp_mean)).collect()
}

/// KL-Cov's choice: this share of the tokens, at least one, with the largest covariance. Of tokens that are equal but
/// for rounding the first is taken: completions of one prompt often begin alike.
pub fn kl_cov_mask(covariances: &[f64], share: f64) -> Vec<bool> {
    let rounded: Vec<f64> = covariances.iter().map(|c| (c * 1e4).round()).collect();
    let mut order: Vec<usize> = (0..covariances.len()).collect();
    order.sort_by(|&a, &b| rounded[b].total_cmp(&rounded[a]));
    let mut chosen = vec![false; covariances.len()];
    let count = ((covariances.len() as f64 * share) as usize).max(1);
    for &i in order.iter().take(count) {
        chosen[i] = true;
    }
    chosen
}

/// Clip-Cov's choice: this share of all tokens, at least one, drawn from those that the clip leaves alone and whose
/// covariance lies between the bounds.
pub fn clip_cov_mask(by: ClipCov, covariances: &[f64], clipped: &[bool], mut random: Stream) -> Vec<bool> {
    let within = |c: f64| c > by.clip_cov_lb && c < by.clip_cov_ub;
    let mut candidates: Vec<usize> =
        (0..covariances.len()).filter(|&i| !clipped[i] && within(covariances[i])).collect();
    random.shuffle(&mut candidates);
    let count = ((covariances.len() as f64 * by.clip_cov_ratio) as usize).max(1);
    let mut chosen = vec![false; covariances.len()];
    for &i in candidates.iter().take(count) {
        chosen[i] = true;
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_share_is_penalized_and_at_least_one_token() {
        let covariances = [0.1, 5.0, -3.0, 2.0];
        assert_eq!(kl_cov_mask(&covariances, 0.5), [false, true, false, true]);
        assert_eq!(kl_cov_mask(&covariances, 1e-4), [false, true, false, false]);
    }

    #[test]
    fn tokens_are_drawn_between_the_bounds_and_not_where_the_clip_acts() {
        let by = ClipCov { clip_cov_ratio: 0.5, ..ClipCov::default() };
        let covariances = [2.0, 3.0, 4.0, 2.5, 0.5, 9.0];
        let clipped = [true, false, false, false, false, false];
        let drawn = |seed| clip_cov_mask(by, &covariances, &clipped, Stream::new(seed, 0));
        for seed in 0..20 {
            let chosen = drawn(seed);
            assert_eq!(chosen, [false, true, true, true, false, false]);
        }
        let fewer = ClipCov { clip_cov_ratio: 0.2, ..by };
        let one = |seed| clip_cov_mask(fewer, &covariances, &clipped, Stream::new(seed, 0));
        assert_eq!(one(1).iter().filter(|c| **c).count(), 1);
        assert_eq!(one(1), one(1), "the same seed draws the same");
        assert!((0..20).any(|seed| one(seed) != one(0)), "another, another");
    }
}
