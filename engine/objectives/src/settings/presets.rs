//! What each algorithm's paper sets, over GRPO's defaults.

use super::algorithm::Algorithm;
use super::choices::{AdvEstimator as Adv, PolicyLossMode as Loss};
use super::config::ObjectiveConfig;
use crate::advantage::ScaleRewards;
use crate::aggregate::LossAggMode;
use crate::kl::KlType;
use crate::policy::ImportanceSamplingLevel;

impl From<Algorithm> for ObjectiveConfig {
    /// [`Algorithm::settings`].
    fn from(algorithm: Algorithm) -> Self {
        algorithm.settings()
    }
}

impl Algorithm {
    /// What the algorithm's paper sets, and GRPO's defaults for the rest.
    #[must_use]
    pub fn settings(self) -> ObjectiveConfig {
        match self {
            Self::Grpo => self.with(Adv::Grpo, Loss::Clip),
            Self::DrGrpo => ObjectiveConfig {
                scale_rewards: ScaleRewards::None,
                loss_agg_mode: LossAggMode::SeqMeanTokenSumNorm,
                ..self.with(Adv::Grpo, Loss::Clip)
            },
            Self::Dapo => {
                ObjectiveConfig { clip_ratio_high: 0.28, clip_ratio_c: None, ..self.with(Adv::Grpo, Loss::Clip) }
            }
            Self::Gspo => self.gspo(ImportanceSamplingLevel::Sequence),
            Self::GspoToken => self.gspo(ImportanceSamplingLevel::SequenceToken),
            Self::Luspo => ObjectiveConfig {
                clip_ratio_low: 2e-3,
                clip_ratio_high: 2.5e-3,
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..self.gspo(ImportanceSamplingLevel::Sequence)
            },
            Self::Cispo => {
                ObjectiveConfig { clip_ratio_low: 1.0, clip_ratio_high: 4.0, ..self.with(Adv::Grpo, Loss::Cispo) }
            }
            Self::Sapo => {
                ObjectiveConfig { loss_agg_mode: LossAggMode::SeqMeanTokenMean, ..self.with(Adv::Grpo, Loss::Sapo) }
            }
            Self::Gmpo => ObjectiveConfig {
                clip_ratio_low: 0.4,
                clip_ratio_high: 0.4,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..self.with(Adv::Grpo, Loss::GeoMean)
            },
            Self::Vespo => self.with(Adv::Grpo, Loss::Vespo),
            Self::Gpg => self.with(Adv::Gpg, Loss::Reinforce),
            Self::KlCov => self.with(Adv::Grpo, Loss::KlCov),
            Self::ClipCov => self.with(Adv::Grpo, Loss::ClipCov),
            Self::Rloo => ObjectiveConfig {
                importance_sampling_level: ImportanceSamplingLevel::SequenceProduct,
                clip_ratio_c: None,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..self.with(Adv::Rloo, Loss::Clip)
            },
            Self::ReinforcePlusPlus => {
                ObjectiveConfig { use_kl_in_reward: true, ..self.with(Adv::ReinforcePlusPlus, Loss::Clip) }
            }
            Self::ReinforcePlusPlusBaseline => ObjectiveConfig {
                kl_loss_coef: 0.001,
                kl_loss_type: KlType::K2,
                ..self.with(Adv::ReinforcePlusPlusBaseline, Loss::Clip)
            },
            Self::Remax => ObjectiveConfig {
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..self.with(Adv::Remax, Loss::Reinforce)
            },
            Self::Opo => self.with(Adv::Opo, Loss::Reinforce),
            Self::PassAtK => self.with(Adv::PassAtK, Loss::Clip),
            Self::Ppo => self.with(Adv::Gae, Loss::Clip),
        }
    }

    /// The defaults with an advantage estimator and a policy loss.
    fn with(self, adv_estimator: Adv, policy_loss: Loss) -> ObjectiveConfig {
        ObjectiveConfig { name: self, adv_estimator, policy_loss, ..ObjectiveConfig::default() }
    }

    /// GSPO's settings (section 5.1 of its paper).
    fn gspo(self, level: ImportanceSamplingLevel) -> ObjectiveConfig {
        ObjectiveConfig {
            importance_sampling_level: level,
            clip_ratio_low: 3e-4,
            clip_ratio_high: 4e-4,
            clip_ratio_c: None,
            loss_agg_mode: LossAggMode::SeqMeanTokenMean,
            ..self.with(Adv::Grpo, Loss::Clip)
        }
    }
}
