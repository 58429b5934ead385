//! GRPO: the group's mean as baseline.

use super::groups::{ScaleRewards, group_members, mean, std};

/// Group-relative advantages (GRPO, arXiv:2402.03300): `(R − mean_group) / (std + eps)`.
///
/// `groups[i]` names the group of reward `i`. A group of one keeps its reward: mean 0, std 1 (verl).
pub fn grpo(rewards: &[f64], groups: &[u64], scale: ScaleRewards, eps: f64) -> Vec<f64> {
    let batch_std = std(rewards);
    let mut out = vec![0.0; rewards.len()];
    for members in group_members(groups) {
        let group: Vec<f64> = members.iter().map(|&i| rewards[i]).collect();
        let (centre, spread) = match group.len() {
            1 => (0.0, 1.0),
            _ => (mean(&group), std(&group)),
        };
        for &i in &members {
            let deviation = rewards[i] - centre;
            out[i] = match scale {
                ScaleRewards::Group => deviation / (spread + eps),
                ScaleRewards::Batch => deviation / (batch_std + eps),
                ScaleRewards::None => deviation,
            };
        }
    }
    out
}

/// GRPO with mean and standard deviation of the group's other rewards (`NeMo RL`'s `use_leave_one_out_baseline`), which
/// do not divide where they are all equal. A group of one has no advantage.
pub fn grpo_leave_one_out(rewards: &[f64], groups: &[u64], scale: ScaleRewards, eps: f64) -> Vec<f64> {
    let batch_std = std(rewards);
    let mut out = vec![0.0; rewards.len()];
    for members in group_members(groups).into_iter().filter(|members| members.len() > 1) {
        for &i in &members {
            let others: Vec<f64> = members.iter().filter(|&&j| j != i).map(|&j| rewards[j]).collect();
            let deviation = rewards[i] - mean(&others);
            let spread = match scale {
                ScaleRewards::Group => std(&others),
                ScaleRewards::Batch => batch_std,
                ScaleRewards::None => 0.0,
            };
            out[i] = if spread > 0.0 { deviation / (spread + eps) } else { deviation };
        }
    }
    out
}
