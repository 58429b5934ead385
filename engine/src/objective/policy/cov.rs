//! KL-Cov and Clip-Cov (arXiv:2505.22617): entropy falls by the few tokens whose log-prob and advantage vary together most,
//! so those are penalised or left out. They are chosen out of the whole optimizer step.

use super::{Clip, PolicyTerms, Ratios};
use crate::objective::ObjectiveConfig;
use firebrick_models::random::Stream;

/// `−A r`, and `+ coefficient · |logp − old|` for the chosen tokens.
pub(super) fn kl_cov(coefficient: f64, ratios: &Ratios<'_>) -> PolicyTerms {
    let advantage = ratios.inputs.advantage.clone();
    let mut loss = ratios.log_ratio.clone().exp() * advantage.clone().neg();
    if let Some(chosen) = &ratios.inputs.chosen {
        loss = loss + ratios.difference.clone().abs() * (chosen.clone() * coefficient);
    }
    let none = advantage.zeros_like();
    PolicyTerms {
        loss,
        clipped: none.clone(),
        clipped_lower: none,
    }
}

/// The clipped loss, and none of it for the chosen tokens; those are what counts as clipped.
pub(super) fn clip_cov(clip: Clip, ratios: &Ratios<'_>) -> PolicyTerms {
    let clip = Clip { dual: None, ..clip };
    let terms = super::clip::clip(clip, ratios);
    let chosen = match &ratios.inputs.chosen {
        Some(chosen) => chosen.clone(),
        None => terms.clipped.zeros_like(),
    };
    PolicyTerms {
        loss: terms.loss * (chosen.clone().neg() + 1.0),
        clipped: chosen,
        clipped_lower: terms.clipped_lower,
    }
}

/// `(A − mean A) (logp − mean logp)` of the tokens of an optimizer step.
#[must_use]
pub fn covariances(logp: &[f64], advantages: &[f64]) -> Vec<f64> {
    let n = logp.len().max(1) as f64;
    let mean = |values: &[f64]| values.iter().sum::<f64>() / n;
    let (of_logp, of_advantage) = (mean(logp), mean(advantages));
    let both = logp.iter().zip(advantages);
    both.map(|(l, a)| (a - of_advantage) * (l - of_logp))
        .collect()
}

/// KL-Cov's choice: this share of the tokens, at least one, those with the largest covariance; of equals the first.
#[must_use]
pub fn largest(covariances: &[f64], share: f64) -> Vec<bool> {
    let mut order: Vec<usize> = (0..covariances.len()).collect();
    order.sort_by(|&a, &b| covariances[b].total_cmp(&covariances[a]));
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
pub fn drawn(
    config: &ObjectiveConfig,
    covariances: &[f64],
    clipped: &[bool],
    mut random: Stream,
) -> Vec<bool> {
    let within = |c: f64| c > config.clip_cov_lb && c < config.clip_cov_ub;
    let mut candidates: Vec<usize> = (0..covariances.len())
        .filter(|&i| !clipped[i] && within(covariances[i]))
        .collect();
    random.shuffle(&mut candidates);
    let count = ((covariances.len() as f64 * config.clip_cov_ratio) as usize).max(1);
    let mut chosen = vec![false; covariances.len()];
    for &i in candidates.iter().take(count) {
        chosen[i] = true;
    }
    chosen
}
