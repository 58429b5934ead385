//! Which policy loss is minimised.

use super::terms::{ImportanceSamplingLevel, PolicyTerms, Ratios};
use super::{cispo, clip, cov, gmpo, reinforce, sapo, vespo};
use crate::objective::config::ObjectiveConfig;
use crate::objective::sequence_reduction::SequenceReduction;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

/// The policy term (verl's `loss_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyLoss {
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

impl ObjectiveConfig {
    /// Whether the policy term looks at whole sequences.
    pub(in crate::objective) fn looks_at_sequences(&self) -> bool {
        self.importance_sampling_level != ImportanceSamplingLevel::Token
            || matches!(self.policy_loss, PolicyLoss::GeoMean | PolicyLoss::Vespo)
            || self.off_policy_mask_threshold.is_some()
    }

    /// The log of the probability ratio at the configured level, for every token; differentiable.
    pub(in crate::objective) fn log_ratio(
        &self,
        difference: Tensor<1>,
        segments: Option<&SequenceReduction>,
    ) -> Tensor<1> {
        let log_ratio = match (self.importance_sampling_level, segments) {
            (ImportanceSamplingLevel::Token, _) | (_, None) => difference,
            (ImportanceSamplingLevel::Sequence, Some(s)) => s.spread(s.mean(difference)),
            (ImportanceSamplingLevel::SequenceProduct, Some(s)) => s.spread(s.sum(difference)),
            (ImportanceSamplingLevel::SequenceToken, Some(s)) => {
                let mean = s.spread(s.mean(difference.clone().inner()));
                let own = difference.clone().inner();
                difference + (mean - own)
            }
        };
        log_ratio.clamp(-20.0, 20.0)
    }

    /// The policy term of every token.
    pub(in crate::objective) fn policy_terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        match self.policy_loss {
            PolicyLoss::Clip => clip::clip(self.clip(), ratios),
            PolicyLoss::Cispo => cispo::cispo(self.clip(), ratios),
            PolicyLoss::Sapo => sapo::sapo(self.tau_pos, self.tau_neg, ratios),
            PolicyLoss::GeoMean => gmpo::gmpo(self.clip(), ratios),
            PolicyLoss::Reinforce => reinforce::reinforce(ratios),
            PolicyLoss::KlCov => cov::kl_cov(self.ppo_kl_coef, ratios),
            PolicyLoss::ClipCov => cov::clip_cov(self.clip(), ratios),
            PolicyLoss::Vespo => vespo::vespo(self, ratios),
        }
    }
}
