//! The conversion of flat settings into a [`PolicyGradient`]. Every part reads its own settings; a changed setting that
//! no part reads is refused.

use super::choices::{AdvEstimator, MultiObjectiveAggregation, PolicyLossMode, RolloutIs};
use super::config::ObjectiveConfig;
use super::kl_control::{KlControl, KlControlConfig};
use super::reader::{SettingsReader, discount, non_negative, positive, read, refuse, share};
use super::rejections::rejections;
use crate::advantage::{AdvantageEstimator, Gae, GroupEstimator};
use crate::aggregate::{Aggregation, LossAggMode};
use crate::correction::{CorrectionBound, CorrectionLevel, RolloutCorrection};
use crate::entropy::{AdaptiveEntropy, EntropyBonus};
use crate::kl::KlLoss;
use crate::kl_controller::{KlController, KlInReward};
use crate::policy::{ClipCov, ClipRange, KlCov, PolicyLoss, Vespo};
use crate::policy_gradient::{Advantages, PolicyGradient};
use firebrick_core::error::{Error, Result};

impl ObjectiveConfig {
    /// The objective with these settings.
    ///
    /// # Errors
    /// [`Error::Config`] for a setting out of its range, a changed setting that no other setting makes use of, and
    /// settings that exclude each other. The message names the key and what it goes with.
    pub fn build(&self) -> Result<PolicyGradient> {
        let r = &SettingsReader::new(self);
        let objective = PolicyGradient {
            advantages: advantages(r)?,
            mask_truncated_completions: *read!(r, mask_truncated_completions),
            rejections: rejections(r)?,
            correction: correction(r)?,
            loss: policy_loss(r)?,
            off_policy_mask: *read!(r, off_policy_mask_threshold),
            top_entropy: Some(read!(r, top_entropy_quantile, share)).filter(|share| *share < 1.0),
            aggregation: aggregation(r)?,
            kl_loss: kl_loss(r)?,
            entropy_bonus: entropy_bonus(r)?,
        };
        r.refuse_unread()?;
        refuse_together(&objective)?;
        Ok(objective)
    }
}

impl TryFrom<&ObjectiveConfig> for PolicyGradient {
    type Error = Error;

    fn try_from(config: &ObjectiveConfig) -> Result<Self> {
        config.build()
    }
}

fn advantages(r: &SettingsReader<'_>) -> Result<Advantages> {
    let eps = read!(r, adv_eps, non_negative);
    let name = *read!(r, adv_estimator);
    let with_kl = *read!(r, use_kl_in_reward);
    match read!(r, multi_objective_aggregation) {
        MultiObjectiveAggregation::SumThenNormalize => Ok(Advantages::SumThenNormalize {
            estimator: estimator(r, name, eps)?,
            kl_in_reward: with_kl.then(|| kl_in_reward(r)).transpose()?,
        }),
        MultiObjectiveAggregation::NormalizeThenSum => {
            if name != AdvEstimator::Grpo || with_kl {
                return refuse(
                    "objective: multi_objective_aggregation: normalize_then_sum requires adv_estimator: grpo and no \
                     use_kl_in_reward: it normalizes each reward by itself",
                );
            }
            Ok(Advantages::NormalizeThenSum { eps })
        }
    }
}

fn estimator(r: &SettingsReader<'_>, name: AdvEstimator, eps: f64) -> Result<AdvantageEstimator> {
    let group =
        |baseline| AdvantageEstimator::Group { baseline, normalize: read!(r, normalize_advantages).then_some(eps) };
    Ok(match name {
        AdvEstimator::Grpo => group(GroupEstimator::Grpo { scale: *read!(r, scale_rewards), eps }),
        AdvEstimator::GrpoLeaveOneOut => {
            group(GroupEstimator::GrpoLeaveOneOut { scale: *read!(r, scale_rewards), eps })
        }
        AdvEstimator::PassAtK => group(GroupEstimator::PassAtK { scale: *read!(r, scale_rewards), eps }),
        AdvEstimator::Rloo => group(GroupEstimator::Rloo),
        AdvEstimator::RlooVectorized => group(GroupEstimator::RlooVectorized),
        AdvEstimator::Opo => group(GroupEstimator::Opo),
        AdvEstimator::Gpg => group(GroupEstimator::Gpg),
        AdvEstimator::ReinforcePlusPlus => AdvantageEstimator::ReinforcePlusPlus { gamma: read!(r, gamma, discount) },
        AdvEstimator::ReinforcePlusPlusBaseline => AdvantageEstimator::ReinforcePlusPlusBaseline,
        AdvEstimator::Remax => AdvantageEstimator::Remax,
        AdvEstimator::Gae => {
            AdvantageEstimator::Gae(Gae { gamma: read!(r, gamma, discount), lam: read!(r, lam, discount) })
        }
    })
}

fn kl_in_reward(r: &SettingsReader<'_>) -> Result<KlInReward> {
    Ok(KlInReward { estimator: *read!(r, kl_penalty), controller: kl_controller(*read!(r, kl_ctrl))? })
}

fn kl_controller(by: KlControlConfig) -> Result<KlController> {
    if !(by.kl_coef.is_finite() && by.kl_coef >= 0.0) {
        return refuse("objective.kl_ctrl.kl_coef should be 0 or more");
    }
    let positive = |x: f64| x.is_finite() && x > 0.0;
    if !positive(by.target_kl) || !positive(by.horizon) {
        return refuse("objective.kl_ctrl: target_kl and horizon should be above 0");
    }
    match by.kind {
        KlControl::Fixed => Ok(KlController::Fixed { coef: by.kl_coef }),
        KlControl::Adaptive if by.kl_coef == 0.0 => refuse(
            "objective.kl_ctrl.kl_coef is 0, and an adaptive coefficient is multiplied: it would stay 0; start from above 0",
        ),
        KlControl::Adaptive => {
            Ok(KlController::Adaptive { start: by.kl_coef, target: by.target_kl, horizon: by.horizon })
        }
    }
}

fn policy_loss(r: &SettingsReader<'_>) -> Result<PolicyLoss> {
    let level = || *read!(r, importance_sampling_level);
    Ok(match read!(r, policy_loss) {
        PolicyLossMode::Clip => PolicyLoss::Clip { level: level(), range: clip_range(r)?, dual: dual_clip(r)? },
        PolicyLossMode::Cispo => PolicyLoss::Cispo { level: level(), range: clip_range(r)? },
        PolicyLossMode::Sapo => PolicyLoss::Sapo {
            level: level(),
            tau_pos: read!(r, tau_pos, positive),
            tau_neg: read!(r, tau_neg, positive),
        },
        PolicyLossMode::GeoMean => PolicyLoss::GeoMean { range: clip_range(r)? },
        PolicyLossMode::Reinforce => PolicyLoss::Reinforce,
        PolicyLossMode::KlCov => PolicyLoss::KlCov(KlCov {
            share: read!(r, kl_cov_ratio, share),
            coefficient: read!(r, ppo_kl_coef, non_negative),
        }),
        PolicyLossMode::ClipCov => PolicyLoss::ClipCov(clip_cov(r)?),
        PolicyLossMode::Vespo => PolicyLoss::Vespo(Vespo {
            k_pos: read!(r, vespo_k_pos, non_negative),
            lambda_pos: read!(r, vespo_lambda_pos, non_negative),
            k_neg: read!(r, vespo_k_neg, non_negative),
            lambda_neg: read!(r, vespo_lambda_neg, non_negative),
        }),
    })
}

fn clip_range(r: &SettingsReader<'_>) -> Result<ClipRange> {
    let (low, high) = (*read!(r, clip_ratio_low), *read!(r, clip_ratio_high));
    if !(0.0..=1.0).contains(&low) || high.is_nan() || high < 0.0 {
        return refuse(format!(
            "objective: clip_ratio_low should be in 0..1 and clip_ratio_high at least 0, found {low} and {high}"
        ));
    }
    Ok(ClipRange { low, high })
}

fn dual_clip(r: &SettingsReader<'_>) -> Result<Option<f64>> {
    let dual = *read!(r, clip_ratio_c);
    if dual.is_some_and(|c| c.is_nan() || c <= 1.0) {
        return refuse("objective.clip_ratio_c should be above 1; null turns the dual clip off");
    }
    Ok(dual)
}

fn clip_cov(r: &SettingsReader<'_>) -> Result<ClipCov> {
    let (lower, upper) = (*read!(r, clip_cov_lb), *read!(r, clip_cov_ub));
    if lower.is_nan() || upper.is_nan() || lower > upper {
        return refuse("objective: clip_cov_lb should not exceed clip_cov_ub");
    }
    Ok(ClipCov { range: clip_range(r)?, share: read!(r, clip_cov_ratio, share), lower, upper })
}

fn correction(r: &SettingsReader<'_>) -> Result<Option<RolloutCorrection>> {
    let Some(kind) = *read!(r, rollout_is) else {
        return Ok(None);
    };
    let (level, bound) = match kind {
        RolloutIs::TokenTruncate => (CorrectionLevel::Token, CorrectionBound::Truncate),
        RolloutIs::TokenMask => (CorrectionLevel::Token, CorrectionBound::Mask),
        RolloutIs::SequenceTruncate => (CorrectionLevel::Sequence, CorrectionBound::Truncate),
        RolloutIs::SequenceMask => (CorrectionLevel::Sequence, CorrectionBound::Mask),
    };
    let upper = read!(r, rollout_is_threshold, positive);
    let lower = read!(r, rollout_is_threshold_lower).unwrap_or(0.0);
    let lower = non_negative("rollout_is_threshold_lower", lower)?;
    if lower > upper {
        return refuse("objective: rollout_is_threshold_lower should not exceed rollout_is_threshold");
    }
    Ok(Some(RolloutCorrection { level, bound, lower, upper, normalize: *read!(r, rollout_is_batch_normalize) }))
}

fn aggregation(r: &SettingsReader<'_>) -> Result<Aggregation> {
    Ok(match read!(r, loss_agg_mode) {
        LossAggMode::TokenMean => Aggregation::TokenMean,
        LossAggMode::SeqMeanTokenSum => Aggregation::SeqMeanTokenSum,
        LossAggMode::SeqMeanTokenMean => Aggregation::SeqMeanTokenMean,
        LossAggMode::SeqMeanTokenSumNorm => {
            let scale = *read!(r, loss_scale_factor);
            if scale.is_some_and(|s| !(s.is_finite() && s > 0.0)) {
                return refuse(
                    "objective.loss_scale_factor should be above 0; null takes sequences · longest possible completion",
                );
            }
            Aggregation::SeqMeanTokenSumNorm { scale }
        }
    })
}

fn kl_loss(r: &SettingsReader<'_>) -> Result<Option<KlLoss>> {
    let coef = read!(r, kl_loss_coef, non_negative);
    if coef == 0.0 {
        return Ok(None);
    }
    Ok(Some(KlLoss { coef, estimator: *read!(r, kl_loss_type), bias_correction: *read!(r, use_bias_correction_kl) }))
}

fn entropy_bonus(r: &SettingsReader<'_>) -> Result<Option<EntropyBonus>> {
    let coef = *read!(r, entropy_coeff);
    if !coef.is_finite() {
        return refuse("objective.entropy_coeff should be a number");
    }
    if !*read!(r, use_adaptive_entropy) {
        return Ok((coef != 0.0).then_some(EntropyBonus::Fixed { coef }));
    }
    let (min, max) = (*read!(r, entropy_coef_min), *read!(r, entropy_coef_max));
    if !(min..=max).contains(&coef) {
        return refuse(
            "objective: entropy_coeff is the initial value of the adaptive weight, and should be between \
             entropy_coef_min and entropy_coef_max",
        );
    }
    Ok(Some(EntropyBonus::Adaptive(AdaptiveEntropy {
        start: coef,
        target: *read!(r, entropy_target),
        min,
        max,
        delta: read!(r, entropy_coef_delta, non_negative),
    })))
}

/// Refuses parts that exclude each other.
fn refuse_together(objective: &PolicyGradient) -> Result<()> {
    let by_sequence = |c: &RolloutCorrection| c.level == CorrectionLevel::Sequence;
    match objective.loss {
        PolicyLoss::GeoMean { .. } if objective.top_entropy.is_some() => refuse(
            "objective: top_entropy_quantile picks tokens, and policy_loss: geo_mean has one term per sequence; change \
             one of the two",
        ),
        PolicyLoss::GeoMean { .. } if objective.advantages.by_token() => refuse(
            "objective: policy_loss: geo_mean takes one advantage per sequence, but adv_estimator: reinforce_plus_plus \
             and gae give one per token",
        ),
        PolicyLoss::Vespo(_) if objective.correction.as_ref().is_some_and(by_sequence) => refuse(
            "objective: policy_loss: vespo multiplies the corrections of a sequence's tokens itself; take rollout_is: \
             token_truncate or token_mask",
        ),
        PolicyLoss::GeoMean { .. }
        | PolicyLoss::Vespo(_)
        | PolicyLoss::Clip { .. }
        | PolicyLoss::Cispo { .. }
        | PolicyLoss::Sapo { .. }
        | PolicyLoss::Reinforce
        | PolicyLoss::KlCov(_)
        | PolicyLoss::ClipCov(_) => Ok(()),
    }
}
