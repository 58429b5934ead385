//! Which estimator turns rewards into advantages.

use super::groups::normalized;
use super::inputs::AdvantageInputs;
use super::{
    gae, gpg, grpo, opo, pass_at_k, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, rloo,
    rloo_vectorized,
};
use crate::objective::config::ObjectiveConfig;
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

/// What happens to several rewards (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MultiObjectiveAggregation {
    /// Their weighted sum is one reward.
    SumThenNormalize,
    /// Each is normalised in its group, their weighted sum over the step (GDPO, arXiv:2601.05242).
    NormalizeThenSum,
}

/// Advantages of every token under an objective's settings.
#[must_use]
pub fn estimate(config: &ObjectiveConfig, outcomes: AdvantageInputs<'_>) -> Vec<Vec<f64>> {
    let (totals, groups) = (outcomes.sequence_rewards(), outcomes.groups);
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
        return outcomes.expand(&normalized(&by_completion, config.adv_eps));
    }
    outcomes.expand(&by_completion)
}
