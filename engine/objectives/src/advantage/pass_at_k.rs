//! Pass@k: the best of a group has an advantage, its lead over the second best; the others have none
//! (arXiv:2503.19595).

use super::groups::{ScaleRewards, group_members, std};

/// `R_max − R_second` for the group's best (the first of several), 0 for the others; over the group's standard
/// deviation with [`ScaleRewards::Group`], over the step's with `Batch`. A group of one has no second, and no
/// advantage.
pub fn pass_at_k(rewards: &[f64], groups: &[u64], scale: ScaleRewards, eps: f64) -> Vec<f64> {
    let batch_std = std(rewards);
    let mut out = vec![0.0; rewards.len()];
    for mut members in group_members(groups) {
        let group: Vec<f64> = members.iter().map(|&i| rewards[i]).collect();
        // stable: of equals, the first is the best
        members.sort_by(|&a, &b| rewards[b].total_cmp(&rewards[a]));
        let [best, second, ..] = members[..] else {
            continue;
        };
        let lead = rewards[best] - rewards[second];
        out[best] = match scale {
            ScaleRewards::Group => lead / (std(&group) + eps),
            ScaleRewards::Batch => lead / (batch_std + eps),
            ScaleRewards::None => lead,
        };
    }
    out
}
