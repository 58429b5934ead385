//! Rewards into advantages, on plain slices: an estimator a page.

mod gae;
mod gpg;
mod grpo;
mod objectives;
mod opo;
mod pass_at_k;
mod reinforce_plus_plus;
mod remax;
mod rloo;

pub use gae::gae;
pub use gpg::gpg;
pub use grpo::grpo;
pub use objectives::normalize_then_sum;
pub use opo::opo;
pub use pass_at_k::pass_at_k;
pub use reinforce_plus_plus::{reinforce_plus_plus, reinforce_plus_plus_baseline, returns};
pub use remax::remax;
pub use rloo::{rloo, rloo_vectorized};

use super::ObjectiveConfig;
use serde::{Deserialize, Serialize};

/// How rewards become advantages (verl's `adv_estimator`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvEstimator {
    /// Less the group's mean, over its standard deviation.
    Grpo,
    /// Less the mean of the group's others. A group of one keeps its reward.
    Rloo,
    /// The same; a group of one has no advantage.
    RlooVectorized,
    /// Returns by token, normalised over the step.
    ReinforcePlusPlus,
    /// Less the group's mean, normalised over the step.
    ReinforcePlusPlusBaseline,
    /// Returns by token less the reward of the greedy completion.
    Remax,
    /// Less the group's mean weighted by length.
    Opo,
    /// The lead of the group's best, for the best alone (verl's `grpo_passk`).
    #[serde(alias = "grpo_passk")]
    PassAtK,
    /// Less the group's mean, times the step's completions over those with a reward.
    Gpg,
    /// By a critic: generalised advantage estimation, normalised over the step (PPO).
    Gae,
}

impl AdvEstimator {
    /// Whether completions of one prompt are compared, so that a group needs at least two.
    #[must_use]
    pub fn compares_a_group(self) -> bool {
        !matches!(self, Self::ReinforcePlusPlus | Self::Remax | Self::Gae)
    }

    /// Whether it normalises over the step by itself.
    #[must_use]
    pub fn whitens(self) -> bool {
        matches!(
            self,
            Self::ReinforcePlusPlus | Self::ReinforcePlusPlusBaseline | Self::Gae
        )
    }
}

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

/// What happens to several rewards (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MultiObjective {
    /// Their weighted sum is one reward.
    SumThenNormalize,
    /// Each is normalised in its group, their weighted sum over the step (GDPO, arXiv:2601.05242).
    NormalizeThenSum,
}

/// Judged completions of a step, one entry each.
#[derive(Clone, Copy, Debug)]
pub struct Outcomes<'a> {
    /// Reward of every token.
    pub rewards: &'a [Vec<f64>],
    /// Which tokens are scored.
    pub masks: &'a [Vec<bool>],
    /// The group it belongs to.
    pub groups: &'a [u64],
    /// Reward of the greedy completion of its prompt, where there is one.
    pub baselines: &'a [f64],
    /// A critic's value of every token, where there is one.
    pub values: &'a [Vec<f64>],
}

impl Outcomes<'_> {
    /// Each completion's reward: the sum over its tokens.
    #[must_use]
    pub fn totals(&self) -> Vec<f64> {
        self.rewards.iter().map(|own| own.iter().sum()).collect()
    }

    /// Scored tokens of each.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        let scored = |mask: &Vec<bool>| mask.iter().filter(|m| **m).count();
        self.masks.iter().map(scored).collect()
    }

    /// A number of each completion for all of its tokens.
    #[must_use]
    pub fn spread(&self, values: &[f64]) -> Vec<Vec<f64>> {
        let of = |(mask, value): (&Vec<bool>, &f64)| vec![*value; mask.len()];
        self.masks.iter().zip(values).map(of).collect()
    }
}

/// Advantages of every token under an objective's settings.
#[must_use]
pub fn estimate(config: &ObjectiveConfig, outcomes: Outcomes<'_>) -> Vec<Vec<f64>> {
    let (totals, groups) = (outcomes.totals(), outcomes.groups);
    let by_completion = match config.adv_estimator {
        AdvEstimator::ReinforcePlusPlus => return reinforce_plus_plus(outcomes, config.gamma),
        AdvEstimator::ReinforcePlusPlusBaseline => return reinforce_plus_plus_baseline(outcomes),
        AdvEstimator::Gae => return gae(outcomes, config.gae()),
        AdvEstimator::Remax => return remax(outcomes),
        AdvEstimator::Grpo => grpo(&totals, groups, config.scale_rewards, config.adv_eps),
        AdvEstimator::Rloo => rloo(&totals, groups),
        AdvEstimator::RlooVectorized => rloo_vectorized(&totals, groups),
        AdvEstimator::Opo => opo(&totals, groups, &outcomes.lengths()),
        AdvEstimator::PassAtK => pass_at_k(&totals, groups, config.scale_rewards, config.adv_eps),
        AdvEstimator::Gpg => gpg(&totals, groups),
    };
    if config.normalize_advantages {
        return outcomes.spread(&normalized(&by_completion, config.adv_eps));
    }
    outcomes.spread(&by_completion)
}

/// Less their mean, over their standard deviation.
#[must_use]
pub fn normalized(values: &[f64], eps: f64) -> Vec<f64> {
    let (centre, spread) = (mean(values), std(values));
    values
        .iter()
        .map(|v| (v - centre) / (spread + eps))
        .collect()
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
