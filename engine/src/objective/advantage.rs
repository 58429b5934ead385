//! Rewards into advantages, on plain slices.

/// Whether and over what a reward's deviation is divided by its standard deviation (Bessel-corrected).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRewards {
    /// By the group's (GRPO; verl's `norm_adv_by_std_in_grpo: true`).
    Group,
    /// By the whole step's (TRL's `batch`).
    Batch,
    /// Not at all (Dr. GRPO, arXiv:2503.20783).
    None,
}

/// Group-relative advantages (GRPO, arXiv:2402.03300): `(R − mean_group) / (std + eps)`.
///
/// `groups[i]` names the group of reward `i`. A group of one keeps its reward: mean 0, std 1 (verl).
#[must_use]
pub fn grpo(rewards: &[f64], groups: &[u64], scale: ScaleRewards, eps: f64) -> Vec<f64> {
    let batch_std = std(rewards);
    let mut out = vec![0.0; rewards.len()];
    for members in members(groups) {
        let own: Vec<f64> = members.iter().map(|&i| rewards[i]).collect();
        let (centre, spread) = match own.len() {
            1 => (0.0, 1.0),
            _ => (mean(&own), std(&own)),
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

/// Share of groups whose rewards are all equal: they teach nothing (`frac_reward_zero_std`).
#[must_use]
pub fn zero_std_share(rewards: &[f64], groups: &[u64]) -> f64 {
    let all = members(groups);
    let flat = all.iter().filter(|m| {
        m.iter()
            .all(|&i| rewards[i].to_bits() == rewards[m[0]].to_bits())
    });
    flat.count() as f64 / all.len().max(1) as f64
}

/// Indices of each group's members, groups in order of first appearance.
fn members(groups: &[u64]) -> Vec<Vec<usize>> {
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

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Bessel-corrected; 0 for fewer than two values.
fn std(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let centre = mean(values);
    let squares: f64 = values.iter().map(|v| (v - centre).powi(2)).sum();
    (squares / (values.len() - 1) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_with_equal_rewards_has_no_advantage_and_is_counted() {
        let rewards = [1.0, 1.0, 0.0, 1.0];
        let groups = [0, 0, 1, 1];
        let advantages = grpo(&rewards, &groups, ScaleRewards::Group, 1e-6);
        assert!(advantages[0].abs() < 1e-12 && advantages[1].abs() < 1e-12);
        assert!(advantages[3] > 0.7 && advantages[2] < -0.7);
        assert!((zero_std_share(&rewards, &groups) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn groups_need_not_stand_together() {
        let together = grpo(
            &[1.0, 0.0, 3.0, 5.0],
            &[7, 7, 9, 9],
            ScaleRewards::None,
            0.0,
        );
        let apart = grpo(
            &[1.0, 3.0, 0.0, 5.0],
            &[7, 9, 7, 9],
            ScaleRewards::None,
            0.0,
        );
        let in_order = [together[0], together[2], together[1], together[3]];
        for (a, b) in in_order.iter().zip(&apart) {
            assert!((a - b).abs() < 1e-15, "{in_order:?} {apart:?}");
        }
    }
}
