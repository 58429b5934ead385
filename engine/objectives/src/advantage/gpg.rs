//! GPG: the group's mean as baseline, and more weight for a step in which few completions have a reward
//! (arXiv:2504.02546).

use super::groups::{group_members, mean};

/// `α (R − mean_group)` with α = completions of the step over those whose reward is not 0 (verl). A group of one keeps
/// its reward.
pub fn gpg(rewards: &[f64], groups: &[u64]) -> Vec<f64> {
    let earning = rewards.iter().filter(|r| **r != 0.0).count().max(1);
    let alpha = rewards.len() as f64 / earning as f64;
    let mut out = vec![0.0; rewards.len()];
    for members in group_members(groups) {
        let group: Vec<f64> = members.iter().map(|&i| rewards[i]).collect();
        let centre = if group.len() == 1 { 0.0 } else { mean(&group) };
        for (&i, reward) in members.iter().zip(&group) {
            out[i] = alpha * (reward - centre);
        }
    }
    out
}
