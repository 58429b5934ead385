//! What each algorithm's paper sets, over GRPO's defaults.

use super::algorithm::Algorithm;
use super::choices::{AdvEstimator, PolicyLossMode};
use super::config::ObjectiveConfig;
use crate::objective::advantage::ScaleRewards;
use crate::objective::aggregate::LossAggMode;
use crate::objective::kl::KlType;
use crate::objective::policy::ImportanceSamplingLevel;

impl Algorithm {
    /// What the algorithm's paper sets, and GRPO's defaults for the rest.
    #[must_use]
    pub fn settings(self) -> ObjectiveConfig {
        let base = ObjectiveConfig {
            name: self,
            ..ObjectiveConfig::default()
        };
        match self {
            Self::Grpo => base,
            Self::DrGrpo => ObjectiveConfig {
                scale_rewards: ScaleRewards::None,
                loss_agg_mode: LossAggMode::SeqMeanTokenSumNorm,
                ..base
            },
            Self::Dapo => ObjectiveConfig {
                clip_ratio_high: 0.28,
                clip_ratio_c: None,
                ..base
            },
            Self::Gspo => self.whole_sequences(ImportanceSamplingLevel::Sequence),
            Self::GspoToken => self.whole_sequences(ImportanceSamplingLevel::SequenceToken),
            Self::Luspo => ObjectiveConfig {
                clip_ratio_low: 2e-3,
                clip_ratio_high: 2.5e-3,
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..self.whole_sequences(ImportanceSamplingLevel::Sequence)
            },
            Self::Cispo => ObjectiveConfig {
                policy_loss: PolicyLossMode::Cispo,
                clip_ratio_low: 1.0,
                clip_ratio_high: 4.0,
                ..base
            },
            Self::Sapo => ObjectiveConfig {
                policy_loss: PolicyLossMode::Sapo,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..base
            },
            Self::Gmpo => ObjectiveConfig {
                policy_loss: PolicyLossMode::GeoMean,
                clip_ratio_low: 0.4,
                clip_ratio_high: 0.4,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..base
            },
            Self::Vespo => ObjectiveConfig {
                policy_loss: PolicyLossMode::Vespo,
                ..base
            },
            Self::Gpg => ObjectiveConfig {
                adv_estimator: AdvEstimator::Gpg,
                policy_loss: PolicyLossMode::Reinforce,
                ..base
            },
            Self::KlCov => ObjectiveConfig {
                policy_loss: PolicyLossMode::KlCov,
                ..base
            },
            Self::ClipCov => ObjectiveConfig {
                policy_loss: PolicyLossMode::ClipCov,
                ..base
            },
            Self::Rloo => ObjectiveConfig {
                adv_estimator: AdvEstimator::Rloo,
                importance_sampling_level: ImportanceSamplingLevel::SequenceProduct,
                clip_ratio_c: None,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..base
            },
            Self::ReinforcePlusPlus => ObjectiveConfig {
                adv_estimator: AdvEstimator::ReinforcePlusPlus,
                use_kl_in_reward: true,
                ..base
            },
            Self::ReinforcePlusPlusBaseline => ObjectiveConfig {
                adv_estimator: AdvEstimator::ReinforcePlusPlusBaseline,
                kl_loss_coef: 0.001,
                kl_loss_type: KlType::K2,
                ..base
            },
            Self::Remax => ObjectiveConfig {
                adv_estimator: AdvEstimator::Remax,
                policy_loss: PolicyLossMode::Reinforce,
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..base
            },
            Self::Opo => ObjectiveConfig {
                adv_estimator: AdvEstimator::Opo,
                policy_loss: PolicyLossMode::Reinforce,
                ..base
            },
            Self::PassAtK => ObjectiveConfig {
                adv_estimator: AdvEstimator::PassAtK,
                ..base
            },
            Self::Ppo => ObjectiveConfig {
                adv_estimator: AdvEstimator::Gae,
                ..base
            },
        }
    }

    /// GSPO's settings (section 5.1 of its paper).
    fn whole_sequences(self, level: ImportanceSamplingLevel) -> ObjectiveConfig {
        ObjectiveConfig {
            name: self,
            importance_sampling_level: level,
            clip_ratio_low: 3e-4,
            clip_ratio_high: 4e-4,
            clip_ratio_c: None,
            loss_agg_mode: LossAggMode::SeqMeanTokenMean,
            ..ObjectiveConfig::default()
        }
    }
}
