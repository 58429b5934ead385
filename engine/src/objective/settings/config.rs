//! Settings of the policy-gradient family, under verl's and TRL's names.

use super::algorithm::Algorithm;
use super::choices::{AdvEstimator, MultiObjectiveAggregation, PolicyLossMode, RolloutIs};
use super::kl_control::KlControlConfig;
use super::rollout_rs::{RejectionCriteria, RejectionThresholds};
use crate::objective::advantage::ScaleRewards;
use crate::objective::aggregate::LossAggMode;
use crate::objective::kl::KlType;
use crate::objective::policy::ImportanceSamplingLevel;
use serde::{Deserialize, Serialize};

/// The flat settings of a policy-gradient objective, as a configuration file has them: a name, and every setting that
/// it sets. Those that are not written are the named algorithm's own. [`build`](Self::build) makes a
/// [`PolicyGradient`](crate::objective::PolicyGradient) of them and refuses what does not go together.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of the objective that there is or is not")]
pub struct ObjectiveConfig {
    /// The algorithm whose settings stand under those that are written. In code, [`Algorithm::settings`] gives them;
    /// this field alone sets nothing.
    pub name: Algorithm,

    /// How rewards become advantages (verl's `adv_estimator`).
    pub adv_estimator: AdvEstimator,
    /// Division of the advantage by the standard deviation: `group`, `batch` or `none`
    /// (TRL's name; verl's `norm_adv_by_std_in_grpo` is `group` or `none`).
    pub scale_rewards: ScaleRewards,
    /// Added to the standard deviation (verl 1e-6, TRL 1e-4).
    pub adv_eps: f64,
    /// Discount of later rewards, where advantages are by token.
    pub gamma: f64,
    /// With a critic: how far an advantage looks beyond the next value; 0: no further, 1: to the end (verl's name).
    pub lam: f64,
    /// Advantages less their mean over the step, over their standard deviation (TRL's, of RLOO).
    pub normalize_advantages: bool,
    /// Several rewards: summed and normalised, or each normalised by itself and summed (TRL's name).
    pub multi_objective_aggregation: MultiObjectiveAggregation,
    /// Takes the coefficient of `kl_ctrl` · KL to the reference policy off each token's reward (verl's name).
    pub use_kl_in_reward: bool,
    /// Its estimator (verl's name).
    pub kl_penalty: KlType,
    /// Its coefficient, fixed or adaptive (verl's `kl_ctrl`; TRL's `beta` of RLOO is `kl_coef`).
    pub kl_ctrl: KlControlConfig,
    /// Leaves completions that ran into the length limit out of the loss (TRL's name; DAPO's overlong filtering).
    pub mask_truncated_completions: bool,

    /// The policy loss (verl's `policy_loss.loss_mode`).
    pub policy_loss: PolicyLossMode,
    /// What the probability ratio is of (TRL's name).
    pub importance_sampling_level: ImportanceSamplingLevel,
    /// ε below 1.
    pub clip_ratio_low: f64,
    /// ε above 1.
    pub clip_ratio_high: f64,
    /// Dual clip; `null` turns it off.
    pub clip_ratio_c: Option<f64>,
    /// SAPO's temperature where the advantage is positive (verl's name).
    pub tau_pos: f64,
    /// SAPO's temperature elsewhere.
    pub tau_neg: f64,
    /// KL-Cov: the share of the step's tokens that are penalized (verl's name).
    pub kl_cov_ratio: f64,
    /// KL-Cov: the weight of their penalty (verl's name).
    pub ppo_kl_coef: f64,
    /// Clip-Cov: the share of the step's tokens that are left out (verl's name).
    pub clip_cov_ratio: f64,
    /// Clip-Cov: least covariance of a token to be left out.
    pub clip_cov_lb: f64,
    /// Clip-Cov: its largest.
    pub clip_cov_ub: f64,
    /// VESPO: power of the ratio where the advantage is not negative (TRL's name).
    pub vespo_k_pos: f64,
    /// VESPO: decay in the ratio there.
    pub vespo_lambda_pos: f64,
    /// VESPO: power of the ratio where the advantage is negative.
    pub vespo_k_neg: f64,
    /// VESPO: decay in the ratio there.
    pub vespo_lambda_neg: f64,
    /// Leaves tokens with a negative advantage out of the policy loss in sequences whose mean log-prob under the
    /// sampler is more than this above that under the policy (TRL's name). `null`: none.
    pub off_policy_mask_threshold: Option<f64>,
    /// Share of the step's tokens, those of highest entropy, that the policy loss and the entropy bonus look at (TRL's
    /// name).
    pub top_entropy_quantile: f64,

    /// How token losses become one number.
    pub loss_agg_mode: LossAggMode,
    /// What `seq-mean-token-sum-norm` divides by. `null`: sequences · longest possible completion (Dr. GRPO, TRL);
    /// verl's own default is the longest possible completion alone.
    pub loss_scale_factor: Option<f64>,

    /// Weight of the KL to the reference policy in the loss (verl's `kl_loss_coef`, TRL's `beta`). 0: no reference
    /// model.
    pub kl_loss_coef: f64,
    /// Its estimator.
    pub kl_loss_type: KlType,
    /// Multiplies it by the probability ratio (TRL's name).
    pub use_bias_correction_kl: bool,

    /// Weight of the entropy bonus (verl's `entropy_coeff`, TRL's `entropy_coef`); its start where it is adaptive.
    pub entropy_coeff: f64,
    /// Moves the weight by `entropy_coef_delta` an optimizer step: up while the entropy is at or below
    /// `entropy_target`, down while it is above, where there is no bonus at all (TRL's name).
    pub use_adaptive_entropy: bool,
    /// Target entropy of the adaptive weight, in nats.
    pub entropy_target: f64,
    /// Least adaptive weight.
    pub entropy_coef_min: f64,
    /// Largest adaptive weight.
    pub entropy_coef_max: f64,
    /// Its change an optimizer step.
    pub entropy_coef_delta: f64,

    /// Importance-sampling correction of the policy loss between the trainer's old log-probs and those that the tokens
    /// were drawn with. `null`: none.
    pub rollout_is: Option<RolloutIs>,
    /// Its largest weight (verl's name; TRL's `vllm_importance_sampling_clip_max`).
    pub rollout_is_threshold: f64,
    /// Its least weight (TRL's `vllm_importance_sampling_clip_min`). `null`: 0.
    pub rollout_is_threshold_lower: Option<f64>,
    /// Divides the weights by their mean over the step (verl's name).
    pub rollout_is_batch_normalize: bool,
    /// Leaves out tokens or sequences whose log-probs under sampler and trainer are too far apart, by one criterion or
    /// several, joined by commas (verl's name). `null`: none.
    pub rollout_rs: Option<RejectionCriteria>,
    /// Largest divergence, for all criteria or each; for the `k1` kinds the largest ratio of sampler and trainer, or
    /// both bounds.
    pub rollout_rs_threshold: Option<RejectionThresholds>,
    /// For the `k1` kinds the least ratio, where the threshold has none. `null`: 1 / `rollout_rs_threshold`.
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
