//! Names for settings: what each paper sets, over GRPO's defaults.

use super::ObjectiveConfig;
use super::advantage::{AdvEstimator, ScaleRewards};
use super::aggregate::LossAggMode;
use super::kl::KlType;
use super::policy::{Level, PolicyLoss};
use serde::{Deserialize, Serialize};

/// An algorithm of the family by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Algorithm {
    /// Group-relative policy optimisation (arXiv:2402.03300).
    Grpo,
    /// GRPO without its two biases (arXiv:2503.20783).
    DrGrpo,
    /// Clip-higher and token means (arXiv:2503.14476).
    Dapo,
    /// One ratio a sequence (arXiv:2507.18071).
    Gspo,
    /// Its form for advantages by token.
    GspoToken,
    /// GSPO with every sequence's loss times its length (arXiv:2602.05261).
    Luspo,
    /// A clipped ratio as a constant weight of the log-prob (arXiv:2506.13585).
    Cispo,
    /// A sigmoid gate instead of the clip (arXiv:2511.20347).
    Sapo,
    /// The geometric mean of a sequence's ratios (arXiv:2507.20673).
    Gmpo,
    /// A smooth weight of whole sequences' ratios (arXiv:2602.10693).
    Vespo,
    /// The plain policy gradient with group means (arXiv:2504.02546).
    Gpg,
    /// A KL penalty on the tokens of largest covariance (arXiv:2505.22617).
    KlCov,
    /// No gradient for some tokens of large covariance (arXiv:2505.22617).
    ClipCov,
    /// The mean of the others as baseline (arXiv:2402.14740).
    Rloo,
    /// Returns by token, normalised over the step (arXiv:2501.03262).
    ReinforcePlusPlus,
    /// The same with the group's mean as baseline.
    ReinforcePlusPlusBaseline,
    /// The greedy completion's reward as baseline (arXiv:2310.10505).
    Remax,
    /// The length-weighted mean as baseline, exactly on policy (arXiv:2505.23585).
    Opo,
    /// Credit for the best of a group alone (arXiv:2503.19595).
    PassAtK,
    /// Proximal policy optimisation with a critic (arXiv:1707.06347).
    Ppo,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::Grpo,
        Self::DrGrpo,
        Self::Dapo,
        Self::Gspo,
        Self::GspoToken,
        Self::Luspo,
        Self::Cispo,
        Self::Sapo,
        Self::Gmpo,
        Self::Vespo,
        Self::Gpg,
        Self::KlCov,
        Self::ClipCov,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::ReinforcePlusPlusBaseline,
        Self::Remax,
        Self::Opo,
        Self::PassAtK,
        Self::Ppo,
    ];

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
            Self::Gspo => self.whole_sequences(Level::Sequence),
            Self::GspoToken => self.whole_sequences(Level::SequenceToken),
            Self::Luspo => ObjectiveConfig {
                clip_ratio_low: 2e-3,
                clip_ratio_high: 2.5e-3,
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..self.whole_sequences(Level::Sequence)
            },
            Self::Cispo => ObjectiveConfig {
                policy_loss: PolicyLoss::Cispo,
                clip_ratio_low: 1.0,
                clip_ratio_high: 4.0,
                ..base
            },
            Self::Sapo => ObjectiveConfig {
                policy_loss: PolicyLoss::Sapo,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..base
            },
            Self::Gmpo => ObjectiveConfig {
                policy_loss: PolicyLoss::GeoMean,
                clip_ratio_low: 0.4,
                clip_ratio_high: 0.4,
                loss_agg_mode: LossAggMode::SeqMeanTokenMean,
                ..base
            },
            Self::Vespo => ObjectiveConfig {
                policy_loss: PolicyLoss::Vespo,
                ..base
            },
            Self::Gpg => ObjectiveConfig {
                adv_estimator: AdvEstimator::Gpg,
                policy_loss: PolicyLoss::Reinforce,
                ..base
            },
            Self::KlCov => ObjectiveConfig {
                policy_loss: PolicyLoss::KlCov,
                ..base
            },
            Self::ClipCov => ObjectiveConfig {
                policy_loss: PolicyLoss::ClipCov,
                ..base
            },
            Self::Rloo => ObjectiveConfig {
                adv_estimator: AdvEstimator::Rloo,
                importance_sampling_level: Level::SequenceProduct,
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
                policy_loss: PolicyLoss::Reinforce,
                loss_agg_mode: LossAggMode::SeqMeanTokenSum,
                ..base
            },
            Self::Opo => ObjectiveConfig {
                adv_estimator: AdvEstimator::Opo,
                policy_loss: PolicyLoss::Reinforce,
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
    fn whole_sequences(self, level: Level) -> ObjectiveConfig {
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
