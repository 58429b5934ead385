//! Values that settings take by name.

use serde::{Deserialize, Serialize};

/// How rewards become advantages (verl's `adv_estimator`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AdvEstimator {
    /// (R − mean) / (std + `adv_eps`).
    Grpo,
    /// As `grpo`, with mean and std of the others in the group; not divided if they are equal (`NeMo RL`).
    GrpoLeaveOneOut,
    /// R − mean of the others; R in a group of one.
    Rloo,
    /// As `rloo`; 0 in a group of one.
    RlooVectorized,
    /// Returns by token, normalized over the step.
    ReinforcePlusPlus,
    /// R − mean, normalized over the step.
    ReinforcePlusPlusBaseline,
    /// Returns − R of the greedy completion.
    Remax,
    /// R − length-weighted mean.
    Opo,
    /// Best: (R − second best) / (std + `adv_eps`); others: 0.
    #[serde(alias = "grpo_passk")]
    PassAtK,
    /// (R − mean) · completions / completions with R ≠ 0.
    Gpg,
    /// Generalized advantage estimation, normalized over the step.
    Gae,
}

/// How several rewards are combined (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MultiObjectiveAggregation {
    /// Their weighted sum is normalized.
    SumThenNormalize,
    /// Each is normalized in its group, their weighted sum over the step (GDPO).
    NormalizeThenSum,
}

/// The policy loss (verl's `policy_loss.loss_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLossMode {
    /// `max(−A r, −A clip(r))`, with dual clip.
    #[serde(alias = "vanilla")]
    Clip,
    /// `−sg(clip(r)) A logp`.
    Cispo,
    /// `−σ(τ (r − 1)) · 4/τ · A`.
    Sapo,
    /// `−A` times the geometric mean of clipped ratios.
    #[serde(alias = "gmpo")]
    GeoMean,
    /// `−A logp`.
    #[serde(alias = "gpg")]
    Reinforce,
    /// `−A r`, plus `ppo_kl_coef · |logp − old|` for high-covariance tokens.
    KlCov,
    /// `clip` without some high-covariance tokens.
    ClipCov,
    /// `−sg(φ) A logp`, `φ = e^λ w^k e^(−λ w)`; w is the sequence's ratio.
    Vespo,
}

/// How the policy loss is corrected by `w = exp(old − sampler)` (TRL's names; verl's `token` and `sequence` truncate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RolloutIs {
    /// Per token, truncated to the bounds.
    #[serde(alias = "token")]
    TokenTruncate,
    /// Per token, 0 outside the bounds.
    TokenMask,
    /// Per sequence, truncated to the bounds.
    #[serde(alias = "sequence")]
    SequenceTruncate,
    /// Per sequence, 0 outside the bounds.
    SequenceMask,
}
