//! Groups, the completions of one prompt, and their statistics.

use serde::{Deserialize, Serialize};

/// Standard deviation (Bessel-corrected) that a reward's deviation from the mean is divided by (TRL's `scale_rewards`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// Of the group (GRPO).
    #[default]
    Group,
    /// Of the step.
    Batch,
    /// No division (Dr. GRPO).
    None,
}

/// The values less their mean, over their standard deviation plus `eps`.
pub fn normalized(values: &[f64], eps: f64) -> Vec<f64> {
    let (centre, spread) = (mean(values), std(values));
    values.iter().map(|v| (v - centre) / (spread + eps)).collect()
}

/// Share of groups whose rewards are all equal: their advantages are 0 (TRL's `frac_reward_zero_std`). As in TRL, a
/// group of several of which fewer than two have a reward is none of them.
pub fn frac_reward_zero_std(rewards: &[Option<f64>], groups: &[u64]) -> f64 {
    let by_group = group_members(groups);
    let flat = by_group.iter().filter(|members| {
        let known: Vec<u64> = members.iter().filter_map(|&i| rewards[i]).map(f64::to_bits).collect();
        known.len() >= members.len().min(2) && known.iter().all(|reward| *reward == known[0])
    });
    flat.count() as f64 / by_group.len().max(1) as f64
}

/// Indices of each group's members, groups in order of first appearance.
pub(super) fn group_members(groups: &[u64]) -> Vec<Vec<usize>> {
    let mut order: Vec<(u64, Vec<usize>)> = Vec::new();
    let mut place = std::collections::HashMap::new();
    for (i, &group) in groups.iter().enumerate() {
        let at = *place.entry(group).or_insert_with(|| {
            order.push((group, Vec::new()));
            order.len() - 1
        });
        order[at].1.push(i);
    }
    order.into_iter().map(|(_, m)| m).collect()
}

pub(crate) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Bessel-corrected; 0 for fewer than two values.
pub(crate) fn std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let centre = mean(values);
    let squares: f64 = values.iter().map(|v| (v - centre).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}
