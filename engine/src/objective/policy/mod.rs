//! Policy terms per token: what is minimised, before weights, corrections and masks. A loss a page.

mod cispo;
mod clip;
pub mod cov;
mod gmpo;
mod reinforce;
mod sapo;
mod vespo;

pub use clip::Clip;

use super::segments::Segments;
use super::{Metric, ObjectiveConfig, Reduce, TokenInputs, token_mean};
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

/// What the probability ratio is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Each token.
    Token,
    /// The sequence: the geometric mean of its tokens' ratios (GSPO).
    Sequence,
    /// The same in value; each token's gradient goes to itself alone (GSPO-token).
    SequenceToken,
    /// The sequence as one action: the product of its tokens' ratios (RLOO).
    SequenceProduct,
}

/// Per-token loss and what happened, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct PolicyTerms {
    /// To be minimised.
    pub loss: Tensor<1>,
    /// 1 where the ratio was clipped.
    pub clipped: Tensor<1>,
    /// 1 where the loss was held back on the other side: by the dual clip, or by GMPO's clip of negative advantages.
    pub clipped_lower: Tensor<1>,
    /// What the loss reports of its own.
    pub metrics: Vec<Metric>,
}

/// What a policy term looks at, `[tokens]` each.
pub(super) struct Ratios<'a> {
    /// Log-prob under the current policy.
    pub logp: Tensor<1>,
    /// logp − old, token by token.
    pub difference: Tensor<1>,
    /// Its exponent at the configured level, clamped to ±20.
    pub log_ratio: Tensor<1>,
    /// What is known of the tokens.
    pub inputs: &'a TokenInputs,
    /// Where sequences begin and end, for losses that do not separate.
    pub segments: Option<&'a Segments>,
    /// What the ratio is of.
    pub level: Level,
}

impl ObjectiveConfig {
    /// Whether the policy term looks at whole sequences.
    pub(super) fn looks_at_sequences(&self) -> bool {
        self.importance_sampling_level != Level::Token
            || matches!(self.policy_loss, PolicyLoss::GeoMean | PolicyLoss::Vespo)
            || self.off_policy_mask_threshold.is_some()
    }

    /// The log of the probability ratio at the configured level, for every token; differentiable.
    pub(super) fn log_ratio(
        &self,
        difference: Tensor<1>,
        segments: Option<&Segments>,
    ) -> Tensor<1> {
        let log_ratio = match (self.importance_sampling_level, segments) {
            (Level::Token, _) | (_, None) => difference,
            (Level::Sequence, Some(s)) => s.spread(s.mean(difference)),
            (Level::SequenceProduct, Some(s)) => s.spread(s.sum(difference)),
            (Level::SequenceToken, Some(s)) => {
                let mean = s.spread(s.mean(difference.clone().inner()));
                let own = difference.clone().inner();
                difference + (mean - own)
            }
        };
        log_ratio.clamp(-20.0, 20.0)
    }

    /// The policy term of every token.
    pub(super) fn policy_terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
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

impl Ratios<'_> {
    /// Where sequences begin and end.
    fn segments(&self) -> &Segments {
        self.segments
            .expect("a loss that does not separate gets whole sequences")
    }

    /// A mean over what has a ratio: tokens, or sequences where all tokens of one have the same.
    fn mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        match self.level {
            Level::Token | Level::SequenceToken => token_mean(name, values),
            Level::Sequence | Level::SequenceProduct => self.sequence_mean(name, values),
        }
    }

    /// A mean over sequences of their tokens' means.
    fn sequence_mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        Metric {
            name,
            reduce: Reduce::SequenceMean,
            sum: self.segments().mean(values.inner()).sum(),
        }
    }
}
