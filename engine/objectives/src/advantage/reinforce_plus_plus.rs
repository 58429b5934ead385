//! REINFORCE++: no critic and no group, but advantages normalised over the whole step (arXiv:2501.03262).

use super::estimator::AdvantageInputs;
use super::groups::{group_members, mean};
use super::whitening::Whitening;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Discount of the returns.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct ReinforcePlusPlus {
    /// Discount by token (`reinforce_plus_plus`, `gae`).
    #[default(1.0)]
    #[schemars(range(min = 0, max = 1))]
    pub gamma: f64,
}

/// The rewards from each token on, discounted by `gamma` a token.
pub fn returns(rewards: &[f64], gamma: f64) -> Vec<f64> {
    let mut out = vec![0.0; rewards.len()];
    let mut later = 0.0;
    for (out, reward) in out.iter_mut().zip(rewards).rev() {
        later = reward + gamma * later;
        *out = later;
    }
    out
}

/// Returns by token, normalised over the step's scored tokens.
pub fn reinforce_plus_plus(outcomes: AdvantageInputs<'_>, gamma: f64) -> Vec<Vec<f64>> {
    let rows = outcomes.rewards.iter();
    let mut values: Vec<Vec<f64>> = rows.map(|rewards| returns(rewards, gamma)).collect();
    whiten(&mut values, outcomes.masks);
    values
}

/// The reward less the group's mean, normalised over the step's scored tokens. A group of one keeps its reward, but not
/// the only one with a reward in a group of several.
pub fn reinforce_plus_plus_baseline(outcomes: AdvantageInputs<'_>) -> Vec<Vec<f64>> {
    let mut totals = outcomes.sequence_rewards();
    for members in group_members(outcomes.groups) {
        let group: Vec<f64> = members.iter().map(|&i| totals[i]).collect();
        let keeps = group.len() == 1 && !outcomes.is_lone(members[0]);
        let centre = if keeps { 0.0 } else { mean(&group) };
        for &i in &members {
            totals[i] -= centre;
        }
    }
    let mut values = outcomes.expand(&totals);
    whiten(&mut values, outcomes.masks);
    values
}

/// Whitens all tokens by the scored ones of all completions.
fn whiten(rows: &mut [Vec<f64>], masks: &[Vec<bool>]) {
    let pairs = rows.iter().flatten().zip(masks.iter().flatten());
    let by = Whitening::of(pairs.filter(|(_, m)| **m).map(|(v, _)| *v));
    for value in rows.iter_mut().flatten() {
        *value = by.apply(*value);
    }
}
