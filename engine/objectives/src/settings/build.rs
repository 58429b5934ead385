//! The conversion of settings into a [`PolicyGradient`].

use super::config::{MultiObjectiveAggregation, ObjectiveConfig, SCHEMA};
use super::kl_control::{KlControl, KlControlConfig};
use super::rejections::{reject, rejections};
use crate::advantage::AdvantageEstimator;
use crate::aggregate::Aggregation;
use crate::correction::{CorrectionBound, CorrectionLevel, RolloutCorrection, RolloutIs};
use crate::entropy::{AdaptiveEntropy, EntropyBonus};
use crate::kl::KlLoss;
use crate::kl_controller::{KlController, KlInReward};
use crate::policy::PolicyLoss;
use crate::policy_gradient::{Advantages, PolicyGradient};
use firebrick_core::error::{Error, Result};
use firebrick_settings::violations;

impl ObjectiveConfig {
    /// The objective with these settings.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of its range, a changed setting that no other setting makes use of, and
    /// settings that exclude each other. The message names the key and what it goes with.
    pub fn build(&self) -> Result<PolicyGradient> {
        if let Some(violation) = violations(&SCHEMA, &serde_json::to_value(self).unwrap_or_default()).first() {
            return reject(format!("objective.{}", violation.message));
        }
        let objective = PolicyGradient {
            advantages: self.advantages()?,
            mask_truncated_completions: self.mask_truncated_completions,
            rejections: rejections(self)?,
            correction: self.correction()?,
            loss: self.policy_loss,
            off_policy_mask: self.off_policy_mask_threshold,
            top_entropy: Some(self.top_entropy_quantile).filter(|share| *share < 1.0),
            aggregation: Aggregation { mode: self.loss_agg_mode, scale: self.loss_scale_factor },
            kl_loss: (self.kl_loss_coef > 0.0).then_some(KlLoss {
                coef: self.kl_loss_coef,
                estimator: self.kl_loss_type,
                bias_correction: self.use_bias_correction_kl,
            }),
            entropy_bonus: self.entropy_bonus()?,
        };
        check_exclusive(&objective)?;
        Ok(objective)
    }

    fn advantages(&self) -> Result<Advantages> {
        let kl_in_reward = self.use_kl_in_reward.then(|| kl_controller(self.kl_ctrl)).transpose()?;
        let kl_in_reward = kl_in_reward.map(|controller| KlInReward { estimator: self.kl_penalty, controller });
        match self.multi_objective_aggregation {
            MultiObjectiveAggregation::SumThenNormalize => {
                Ok(Advantages::SumThenNormalize { estimator: self.adv_estimator, eps: self.adv_eps, kl_in_reward })
            }
            MultiObjectiveAggregation::NormalizeThenSum
                if self.adv_estimator != AdvantageEstimator::default() || self.use_kl_in_reward =>
            {
                reject(
                    "objective: multi_objective_aggregation: normalize_then_sum requires adv_estimator: grpo without other \
                     scale_rewards or normalize_advantages, and no use_kl_in_reward: it normalizes each reward by itself",
                )
            }
            MultiObjectiveAggregation::NormalizeThenSum => Ok(Advantages::NormalizeThenSum { eps: self.adv_eps }),
        }
    }

    fn correction(&self) -> Result<Option<RolloutCorrection>> {
        let Some(kind) = self.rollout_is else {
            return Ok(None);
        };
        let (level, bound) = match kind {
            RolloutIs::TokenTruncate => (CorrectionLevel::Token, CorrectionBound::Truncate),
            RolloutIs::TokenMask => (CorrectionLevel::Token, CorrectionBound::Mask),
            RolloutIs::SequenceTruncate => (CorrectionLevel::Sequence, CorrectionBound::Truncate),
            RolloutIs::SequenceMask => (CorrectionLevel::Sequence, CorrectionBound::Mask),
        };
        let (lower, upper) = (self.rollout_is_threshold_lower.unwrap_or(0.0), self.rollout_is_threshold);
        if lower > upper {
            return reject("objective: rollout_is_threshold_lower should not exceed rollout_is_threshold");
        }
        Ok(Some(RolloutCorrection { level, bound, lower, upper, normalize: self.rollout_is_batch_normalize }))
    }

    fn entropy_bonus(&self) -> Result<Option<EntropyBonus>> {
        let coef = self.entropy_coeff;
        if !self.use_adaptive_entropy {
            return Ok((coef != 0.0).then_some(EntropyBonus::Fixed { coef }));
        }
        let (min, max) = (self.entropy_coef_min, self.entropy_coef_max);
        if !(min..=max).contains(&coef) {
            return reject(
                "objective: entropy_coeff is the initial value of the adaptive weight, and should be between \
                 entropy_coef_min and entropy_coef_max",
            );
        }
        let (target, delta) = (self.entropy_target, self.entropy_coef_delta);
        Ok(Some(EntropyBonus::Adaptive(AdaptiveEntropy { start: coef, target, min, max, delta })))
    }
}

impl TryFrom<&ObjectiveConfig> for PolicyGradient {
    type Error = Error;

    fn try_from(config: &ObjectiveConfig) -> Result<Self> {
        config.build()
    }
}

fn kl_controller(by: KlControlConfig) -> Result<KlController> {
    match by.kind {
        KlControl::Fixed => Ok(KlController::Fixed { coef: by.kl_coef }),
        KlControl::Adaptive if by.kl_coef == 0.0 => reject(
            "objective.kl_ctrl.kl_coef is 0, and an adaptive coefficient is multiplied: it would stay 0; start from above 0",
        ),
        KlControl::Adaptive => {
            Ok(KlController::Adaptive { start: by.kl_coef, target: by.target_kl, horizon: by.horizon })
        }
    }
}

/// Rejects parts that exclude each other.
fn check_exclusive(objective: &PolicyGradient) -> Result<()> {
    let by_sequence = |c: &RolloutCorrection| c.level == CorrectionLevel::Sequence;
    match objective.loss {
        PolicyLoss::GeoMean(_) if objective.top_entropy.is_some() => reject(
            "objective: top_entropy_quantile picks tokens, and policy_loss: geo_mean has one term per sequence; change \
             one of the two",
        ),
        PolicyLoss::GeoMean(_) if objective.advantages.estimator().is_some_and(AdvantageEstimator::by_token) => reject(
            "objective: policy_loss: geo_mean takes one advantage per sequence, but adv_estimator: reinforce_plus_plus \
             and gae give one per token",
        ),
        PolicyLoss::Vespo(_) if objective.correction.as_ref().is_some_and(by_sequence) => reject(
            "objective: policy_loss: vespo multiplies the corrections of a sequence's tokens itself; take rollout_is: \
             token_truncate or token_mask",
        ),
        PolicyLoss::ClipCov(by) if by.clip_cov_lb > by.clip_cov_ub => {
            reject("objective: clip_cov_lb should not exceed clip_cov_ub")
        }
        _ => Ok(()),
    }
}
