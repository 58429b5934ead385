//! KL-Cov and Clip-Cov (arXiv:2505.22617): the few tokens with the largest covariance of log-prob and advantage reduce
//! the entropy most, so they are penalized or left out. They are chosen out of the whole optimizer step.

use super::clip::{ClipRange, clip};
use super::terms::{PolicyTerms, Ratios};
use firebrick_models::random::Stream;

/// Differences of log-probs up to this are rounding errors, whose sign must not become a gradient.
const ROUNDING: f64 = 1e-5;

/// KL-Cov's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlCov {
    /// Share of the step's tokens that are penalized (verl's `kl_cov_ratio`).
    pub share: f64,
    /// Weight of their penalty (verl's `ppo_kl_coef`).
    pub coefficient: f64,
}

/// Clip-Cov's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipCov {
    /// Where the ratio is clipped.
    pub range: ClipRange,
    /// Share of the step's tokens that are left out (verl's `clip_cov_ratio`).
    pub share: f64,
    /// Covariance above which a token can be left out (verl's `clip_cov_lb`).
    pub lower: f64,
    /// Covariance below which it can (verl's `clip_cov_ub`).
    pub upper: f64,
}

/// `−A r`, and `+ coefficient · |logp − old|` for the chosen tokens.
pub(super) fn kl_cov(coefficient: f64, ratios: &Ratios<'_>) -> PolicyTerms {
    let advantage = ratios.inputs.advantage();
    let mut loss = ratios.log_ratio.clone().exp() * advantage.clone().neg();
    if let Some(chosen) = &ratios.inputs.columns.chosen {
        let apart = ratios.difference.clone().abs();
        let moved = apart.clone().inner().greater_elem(ROUNDING).float();
        loss = loss + apart * (chosen.clone() * moved * coefficient);
    }
    let none = advantage.zeros_like();
    PolicyTerms { loss, clipped: none.clone(), clipped_lower: none, metrics: Vec::new() }
}

/// The clipped loss, 0 for the chosen tokens. Those are reported as clipped.
pub(super) fn clip_cov(range: ClipRange, ratios: &Ratios<'_>) -> PolicyTerms {
    let terms = clip(range, None, ratios);
    let chosen = match &ratios.inputs.columns.chosen {
        Some(chosen) => chosen.clone(),
        None => terms.clipped.zeros_like(),
    };
    PolicyTerms {
        loss: terms.loss * (chosen.clone().neg() + 1.0),
        clipped: chosen,
        clipped_lower: terms.clipped_lower,
        metrics: terms.metrics,
    }
}

/// `(A − mean A) (logp − mean logp)` of the tokens of an optimizer step.
#[must_use]
pub fn covariances(logp: &[f64], advantages: &[f64]) -> Vec<f64> {
    let n = logp.len().max(1) as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / n;
    let (of_logp, of_advantage) = (mean(logp), mean(advantages));
    let both = logp.iter().zip(advantages);
    both.map(|(l, a)| (a - of_advantage) * (l - of_logp)).collect()
}

/// KL-Cov's choice: this share of the tokens, at least one, with the largest covariance. Of tokens that are equal but
/// for rounding the first is taken: completions of one prompt often begin alike.
#[must_use]
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
#[must_use]
pub fn clip_cov_mask(by: ClipCov, covariances: &[f64], clipped: &[bool], mut random: Stream) -> Vec<bool> {
    let within = |c: f64| c > by.lower && c < by.upper;
    let mut candidates: Vec<usize> =
        (0..covariances.len()).filter(|&i| !clipped[i] && within(covariances[i])).collect();
    random.shuffle(&mut candidates);
    let count = ((covariances.len() as f64 * by.share) as usize).max(1);
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
        let by = ClipCov { range: ClipRange { low: 0.2, high: 0.2 }, share: 0.5, lower: 1.0, upper: 5.0 };
        let covariances = [2.0, 3.0, 4.0, 2.5, 0.5, 9.0];
        let clipped = [true, false, false, false, false, false];
        let drawn = |seed| clip_cov_mask(by, &covariances, &clipped, Stream::new(seed, 0));
        for seed in 0..20 {
            let chosen = drawn(seed);
            assert_eq!(chosen, [false, true, true, true, false, false]);
        }
        let fewer = ClipCov { share: 0.2, ..by };
        let one = |seed| clip_cov_mask(fewer, &covariances, &clipped, Stream::new(seed, 0));
        assert_eq!(one(1).iter().filter(|c| **c).count(), 1);
        assert_eq!(one(1), one(1), "the same seed draws the same");
        assert!((0..20).any(|seed| one(seed) != one(0)), "another, another");
    }
}
