//! PPO's advantages by a critic (arXiv:1707.06347), normalised over the step.

use super::Outcomes;
use crate::objective::gae::{Gae, Whitening};

/// What each token turned out to be worth less its value, estimated backwards and normalised over the step's scored tokens.
#[must_use]
pub fn gae(outcomes: Outcomes<'_>, by: Gae) -> Vec<Vec<f64>> {
    let all = outcomes.rewards.iter().zip(outcomes.values);
    let all = all.zip(outcomes.masks);
    let mut advantages: Vec<Vec<f64>> = all
        .map(|((rewards, values), mask)| by.estimate(rewards, values, mask).0)
        .collect();
    let pairs = advantages.iter().flatten();
    let scored = pairs.zip(outcomes.masks.iter().flatten());
    let white = Whitening::of(scored.filter(|(_, m)| **m).map(|(a, _)| *a));
    for advantage in advantages.iter_mut().flatten() {
        *advantage = white.apply(*advantage);
    }
    advantages
}
