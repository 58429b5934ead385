//! RLOO: the mean of the group's other rewards as baseline (arXiv:2402.14740).

use super::groups::{group_members, mean};

/// `G / (G − 1) · (R − mean_group)`: the reward less the mean of the others'. A group of one keeps its reward (verl's
/// `rloo`).
pub fn rloo(rewards: &[f64], groups: &[u64]) -> Vec<f64> {
    leave_one_out(rewards, groups, |reward| reward)
}

/// Like [`rloo`], but a group of one has no advantage (verl's `rloo_vectorized`).
pub fn rloo_vectorized(rewards: &[f64], groups: &[u64]) -> Vec<f64> {
    leave_one_out(rewards, groups, |_| 0.0)
}

fn leave_one_out(rewards: &[f64], groups: &[u64], alone: fn(f64) -> f64) -> Vec<f64> {
    let mut out = vec![0.0; rewards.len()];
    for members in group_members(groups) {
        let group: Vec<f64> = members.iter().map(|&i| rewards[i]).collect();
        let (n, centre) = (group.len() as f64, mean(&group));
        for (&i, &reward) in members.iter().zip(&group) {
            out[i] = match group.len() {
                1 => alone(reward),
                _ => (reward - centre) * n / (n - 1.0),
            };
        }
    }
    out
}
