//! The policy-gradient family: one composition of advantages, a policy loss, masks, corrections, KL terms, an entropy
//! bonus and an aggregation.

mod objective;

use crate::advantage::{AdvantageEstimator, Gae};
use crate::aggregate::Aggregation;
use crate::correction::RolloutCorrection;
use crate::entropy::EntropyBonus;
use crate::kl::KlLoss;
use crate::kl_controller::KlInReward;
use crate::policy::PolicyLoss;
use crate::rejection::Rejection;

/// An objective of the policy-gradient family. [`ObjectiveConfig::build`](crate::ObjectiveConfig::build)
/// makes it from settings; there is no other way, so its parts go together.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyGradient {
    pub(crate) advantages: Advantages,
    /// Leaves completions that ran into the length limit out of the loss (DAPO's overlong filtering).
    pub(crate) mask_truncated_completions: bool,
    /// Criteria that leave out tokens whose log-probs under sampler and trainer are too far apart.
    pub(crate) rejections: Vec<Rejection>,
    /// Importance-sampling weights between sampler and trainer.
    pub(crate) correction: Option<RolloutCorrection>,
    pub(crate) loss: PolicyLoss,
    /// Leaves tokens with a negative advantage out of the policy loss in sequences whose mean log-prob under the
    /// sampler is more than this above that under the policy.
    pub(crate) off_policy_mask: Option<f64>,
    /// Share of the step's tokens, those of highest entropy, that the policy loss and the entropy bonus look at.
    pub(crate) top_entropy: Option<f64>,
    pub(crate) aggregation: Aggregation,
    pub(crate) kl_loss: Option<KlLoss>,
    pub(crate) entropy_bonus: Option<EntropyBonus>,
}

/// Conversion of a step's rewards to advantages (TRL's `multi_objective_aggregation`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Advantages {
    /// The weighted sum of the rewards is one reward.
    SumThenNormalize {
        /// Estimator of the advantage.
        estimator: AdvantageEstimator,
        /// Added to standard deviations.
        eps: f64,
        /// A penalty for the KL to the reference policy that is taken off before.
        kl_in_reward: Option<KlInReward>,
    },
    /// Each reward is normalised in its group, their weighted sum over the step (GDPO, arXiv:2601.05242).
    NormalizeThenSum {
        /// Added to standard deviations.
        eps: f64,
    },
}

impl PolicyGradient {
    /// The conversion of rewards to advantages.
    pub fn advantages(&self) -> &Advantages {
        &self.advantages
    }

    /// The policy loss.
    pub fn policy_loss(&self) -> &PolicyLoss {
        &self.loss
    }

    /// Returns true if it compares the trainer's old log-probs with the sampler's, for corrections or rejections.
    pub fn compares_sampler_and_trainer(&self) -> bool {
        self.correction.is_some() || !self.rejections.is_empty()
    }

    /// Returns true if the loss uses whole sequences.
    fn looks_at_sequences(&self) -> bool {
        self.loss.formula().looks_at_sequences() || self.off_policy_mask.is_some()
    }
}

impl Advantages {
    /// The estimator, where the rewards are summed first.
    pub fn estimator(&self) -> Option<AdvantageEstimator> {
        match self {
            Self::SumThenNormalize { estimator, .. } => Some(*estimator),
            Self::NormalizeThenSum { .. } => None,
        }
    }

    /// The KL penalty in the rewards.
    pub fn kl_in_reward(&self) -> Option<KlInReward> {
        match self {
            Self::SumThenNormalize { kl_in_reward, .. } => *kl_in_reward,
            Self::NormalizeThenSum { .. } => None,
        }
    }

    /// Discount and decay, where a critic estimates advantages.
    pub fn gae(&self) -> Option<Gae> {
        match self.estimator()? {
            AdvantageEstimator::Gae(gae) => Some(gae),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
