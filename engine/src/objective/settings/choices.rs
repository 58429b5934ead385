//! Values that settings take by name.

use serde::{Deserialize, Serialize};

/// How rewards become advantages (verl's `adv_estimator`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
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

/// What happens to several rewards (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MultiObjectiveAggregation {
    /// Their weighted sum is one reward.
    SumThenNormalize,
    /// Each is normalised in its group, their weighted sum over the step (GDPO, arXiv:2601.05242).
    NormalizeThenSum,
}

/// The policy loss (verl's `policy_loss.loss_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLossMode {
    /// PPO's clipped ratio, with clip-higher and dual clip.
    #[serde(alias = "vanilla")]
    Clip,
    /// The clipped ratio as a constant weight of the log-prob.
    Cispo,
    /// A sigmoid of the ratio.
    Sapo,
    /// The geometric mean of the ratios of a sequence.
    #[serde(alias = "gmpo")]
    GeoMean,
    /// The log-prob itself.
    #[serde(alias = "gpg")]
    Reinforce,
    /// A KL penalty on the tokens of largest covariance.
    KlCov,
    /// Some tokens of large covariance left out.
    ClipCov,
    /// A smooth weight of the ratio of whole sequences.
    Vespo,
}

/// How the policy loss is corrected by `w = exp(old − sampler)` (TRL's names; verl's `token` and `sequence` truncate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutIs {
    /// A weight a token, bounded by the thresholds.
    #[serde(alias = "token")]
    TokenTruncate,
    /// A weight a token, 0 outside the thresholds.
    TokenMask,
    /// The product over the sequence, bounded by the thresholds.
    #[serde(alias = "sequence")]
    SequenceTruncate,
    /// The product over the sequence, 0 outside the thresholds.
    SequenceMask,
}
