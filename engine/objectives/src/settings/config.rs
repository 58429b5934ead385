//! Settings of the policy-gradient family, under verl's and TRL's names.

use super::algorithm::Algorithm;
use super::choices::{AdvEstimator, MultiObjectiveAggregation, PolicyLossMode, RolloutIs};
use super::kl_control::KlControlConfig;
use super::rollout_rs::{RejectionCriteria, RejectionThresholds};
use crate::advantage::ScaleRewards;
use crate::aggregate::LossAggMode;
use crate::kl::KlType;
use crate::policy::ImportanceSamplingLevel;
use serde::{Deserialize, Serialize};

/// The settings of a policy-gradient objective, as a configuration file has them: a name, and every setting that it
/// sets. Keys that are not set have the values of the named algorithm; in code, [`Algorithm::settings`] returns them,
/// and the field `name` by itself sets nothing. [`build`](Self::build) makes a
/// [`PolicyGradient`](crate::PolicyGradient) of them and rejects invalid combinations.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of the objective that there is or is not")]
pub struct ObjectiveConfig {
    /// Algorithm that sets all keys that are not given.
    pub name: Algorithm,

    /// How the rewards R of a group (the completions of a prompt) become advantages.
    pub adv_estimator: AdvEstimator,
    /// Standard deviation that advantages are divided by (`grpo`, `grpo_leave_one_out`,
    /// `pass_at_k`).
    pub scale_rewards: ScaleRewards,
    /// Added to the standard deviation.
    pub adv_eps: f64,
    /// Discount by token (`reinforce_plus_plus`, `gae`).
    pub gamma: f64,
    /// λ of `gae`: 0 looks ahead to the next value, 1 to the end.
    pub lam: f64,
    /// Normalize advantages over the step: zero mean, unit standard deviation.
    pub normalize_advantages: bool,
    /// How several rewards are combined.
    pub multi_objective_aggregation: MultiObjectiveAggregation,
    /// Subtract `kl_ctrl.kl_coef` · KL to the reference policy from each token's reward.
    pub use_kl_in_reward: bool,
    /// KL estimator of `use_kl_in_reward`; d = logp − reference.
    pub kl_penalty: KlType,
    /// Coefficient of `use_kl_in_reward`.
    pub kl_ctrl: KlControlConfig,
    /// Exclude truncated completions from the loss (DAPO's overlong filtering).
    pub mask_truncated_completions: bool,

    /// Policy loss; A is the advantage, r the ratio, sg stops the gradient.
    pub policy_loss: PolicyLossMode,
    /// Level of the ratio r (`clip`, `cispo`, `sapo`).
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// Clip range of the ratio below 1.
    pub clip_ratio_low: f64,
    /// Clip range of the ratio above 1.
    pub clip_ratio_high: f64,
    /// Dual clip c: with a negative advantage A, the loss is at most −A·c. `null` disables it.
    pub clip_ratio_c: Option<f64>,
    /// SAPO: τ for positive advantages.
    pub tau_pos: f64,
    /// SAPO: τ for other advantages.
    pub tau_neg: f64,
    /// KL-Cov: fraction of tokens that are penalized.
    pub kl_cov_ratio: f64,
    /// KL-Cov: penalty weight.
    pub ppo_kl_coef: f64,
    /// Clip-Cov: fraction of tokens that are excluded.
    pub clip_cov_ratio: f64,
    /// Clip-Cov: smallest covariance of excluded tokens.
    pub clip_cov_lb: f64,
    /// Clip-Cov: largest covariance of excluded tokens.
    pub clip_cov_ub: f64,
    /// VESPO: k for advantages of at least 0.
    pub vespo_k_pos: f64,
    /// VESPO: λ for advantages of at least 0.
    pub vespo_lambda_pos: f64,
    /// VESPO: k for negative advantages.
    pub vespo_k_neg: f64,
    /// VESPO: λ for negative advantages.
    pub vespo_lambda_neg: f64,
    /// Exclude tokens with negative advantages in sequences whose mean of sampler logp − logp is above this, both before
    /// top-k, top-p and min-p. `null`: none.
    pub off_policy_mask_threshold: Option<f64>,
    /// Fraction of tokens, by highest entropy, that policy loss and entropy bonus use.
    pub top_entropy_quantile: f64,

    /// Reduction of the token losses L. Divisors are counted over the whole optimizer step.
    pub loss_agg_mode: LossAggMode,
    /// Divisor of `seq-mean-token-sum-norm`. `null`: sequences · `rollout.response_length`.
    pub loss_scale_factor: Option<f64>,

    /// Weight of the KL to the reference policy (the policy before the first RL step, or the base model with
    /// `model.lora`) in the loss. 0 loads no reference model, unless `use_kl_in_reward` needs it.
    pub kl_loss_coef: f64,
    /// KL estimator of the loss; d = logp − reference.
    pub kl_loss_type: KlType,
    /// Multiply the KL loss by the ratio, so that `k3` is unbiased off policy.
    pub use_bias_correction_kl: bool,

    /// Weight of the entropy bonus, or its initial value with `use_adaptive_entropy`.
    pub entropy_coeff: f64,
    /// Raise the entropy weight in each optimizer step while entropy is at or below `entropy_target`; above it, lower
    /// the weight and give no bonus.
    pub use_adaptive_entropy: bool,
    /// Target entropy in nats.
    pub entropy_target: f64,
    /// Smallest adaptive entropy weight.
    pub entropy_coef_min: f64,
    /// Largest adaptive entropy weight.
    pub entropy_coef_max: f64,
    /// Change of the adaptive entropy weight per optimizer step.
    pub entropy_coef_delta: f64,

    /// Importance weight w = exp(old − sampler) of the policy loss, both before top-k, top-p and min-p; needs
    /// `update.old_log_probs: trainer`. `null`: none.
    pub rollout_is: Option<RolloutIs>,
    /// Upper bound of w (`rollout_is`).
    pub rollout_is_threshold: f64,
    /// Lower bound of w (`rollout_is`). `null`: 0.
    pub rollout_is_threshold_lower: Option<f64>,
    /// Divide w (`rollout_is`) by its mean over the step.
    pub rollout_is_batch_normalize: bool,
    /// Criteria, joined by commas, that exclude tokens or sequences on which sampler and trainer diverge: `token_k1` to
    /// `token_k3`, `seq_sum_k1` to `seq_sum_k3`, `seq_mean_k1` to `seq_mean_k3`, `seq_max_k2`, `seq_max_k3`. `null`:
    /// none.
    pub rollout_rs: Option<RejectionCriteria>,
    /// Largest divergence, one for all criteria or one each. For `k1` criteria the largest ratio, or both bounds:
    /// `"0.5_2,0.1"`.
    pub rollout_rs_threshold: Option<RejectionThresholds>,
    /// Smallest ratio of `k1` criteria. `null`: 1 / `rollout_rs_threshold`.
    pub rollout_rs_threshold_lower: Option<f64>,
}

impl Default for ObjectiveConfig {
    /// GRPO's (verl's defaults).
    fn default() -> Self {
        Self {
            name: Algorithm::Grpo,
            adv_estimator: AdvEstimator::Grpo,
            scale_rewards: ScaleRewards::Group,
            adv_eps: 1e-6,
            gamma: 1.0,
            lam: 1.0,
            normalize_advantages: false,
            multi_objective_aggregation: MultiObjectiveAggregation::SumThenNormalize,
            use_kl_in_reward: false,
            kl_penalty: KlType::K1,
            kl_ctrl: KlControlConfig::default(),
            mask_truncated_completions: false,
            policy_loss: PolicyLossMode::Clip,
            importance_sampling_level: ImportanceSamplingLevel::Token,
            clip_ratio_low: 0.2,
            clip_ratio_high: 0.2,
            clip_ratio_c: Some(3.0),
            tau_pos: 1.0,
            tau_neg: 1.05,
            kl_cov_ratio: 0.0002,
            ppo_kl_coef: 1.0,
            clip_cov_ratio: 0.0002,
            clip_cov_lb: 1.0,
            clip_cov_ub: 5.0,
            vespo_k_pos: 2.0,
            vespo_lambda_pos: 3.0,
            vespo_k_neg: 3.0,
            vespo_lambda_neg: 2.0,
            off_policy_mask_threshold: None,
            top_entropy_quantile: 1.0,
            loss_agg_mode: LossAggMode::TokenMean,
            loss_scale_factor: None,
            kl_loss_coef: 0.0,
            kl_loss_type: KlType::K3,
            use_bias_correction_kl: false,
            entropy_coeff: 0.0,
            use_adaptive_entropy: false,
            entropy_target: 0.2,
            entropy_coef_min: 0.0,
            entropy_coef_max: 1.0,
            entropy_coef_delta: 0.005,
            rollout_is: None,
            rollout_is_threshold: 2.0,
            rollout_is_threshold_lower: None,
            rollout_is_batch_normalize: false,
            rollout_rs: None,
            rollout_rs_threshold: None,
            rollout_rs_threshold_lower: None,
        }
    }
}
