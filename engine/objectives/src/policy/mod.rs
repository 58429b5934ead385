//! Policy losses per token, before weights, corrections and masks: their choice, inputs and results, and a file each.

mod cispo;
mod clip;
pub mod cov;
mod gmpo;
mod reinforce;
mod sapo;
mod vespo;

pub use cispo::Cispo;
pub use clip::{Clip, ClipRange};
pub use cov::{ClipCov, KlCov};
pub use gmpo::Gmpo;
pub use sapo::Sapo;
pub use vespo::Vespo;

use crate::sequence_reduction::SequenceReduction;
use crate::token_loss::{Metric, Reduction, TokenInputs};
use burn::tensor::Tensor;
use reinforce::Reinforce;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Policy loss; A is the advantage, r the ratio, sg stops the gradient.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "policy_loss", rename_all = "snake_case")]
pub enum PolicyLoss {
    /// `max(−A r, −A clip(r))`, with dual clip.
    #[serde(alias = "vanilla")]
    #[schemars(extend("x-alias" = ["vanilla"]))]
    Clip(Clip),
    /// `−sg(clip(r)) A logp`.
    Cispo(Cispo),
    /// `−σ(τ (r − 1)) · 4/τ · A`.
    Sapo(Sapo),
    /// `−A` times the geometric mean of clipped ratios.
    #[serde(alias = "gmpo")]
    #[schemars(extend("x-alias" = ["gmpo"]))]
    GeoMean(Gmpo),
    /// `−A logp`.
    #[serde(alias = "gpg")]
    #[schemars(extend("x-alias" = ["gpg"]))]
    Reinforce,
    /// `−A r`, plus `ppo_kl_coef · |logp − old|` for high-covariance tokens.
    KlCov(KlCov),
    /// `clip` without some high-covariance tokens.
    ClipCov(ClipCov),
    /// `−sg(φ) A logp`, `φ = e^λ w^k e^(−λ w)`; w is the sequence's ratio.
    Vespo(Vespo),
}

impl Default for PolicyLoss {
    fn default() -> Self {
        Self::Clip(Clip::default())
    }
}

impl PolicyLoss {
    /// The loss by its formula.
    pub(crate) fn formula(&self) -> &dyn TokenPolicyLoss {
        match self {
            Self::Clip(loss) => loss,
            Self::Cispo(loss) => loss,
            Self::Sapo(loss) => loss,
            Self::GeoMean(loss) => loss,
            Self::Reinforce => &Reinforce,
            Self::KlCov(loss) => loss,
            Self::ClipCov(loss) => loss,
            Self::Vespo(loss) => loss,
        }
    }
}

/// Level of the probability ratio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceSamplingLevel {
    /// Per token.
    #[default]
    Token,
    /// Geometric mean over the sequence (GSPO).
    Sequence,
    /// As `sequence`, with per-token gradients (GSPO-token).
    SequenceToken,
    /// All ratios of the sequence multiplied (RLOO).
    SequenceProduct,
}

/// A policy loss and what was clipped, `[tokens]` each.
#[derive(Clone, Debug)]
pub struct PolicyTerms {
    /// The loss.
    pub loss: Tensor<1>,
    /// 1 where the ratio was clipped.
    pub clipped: Tensor<1>,
    /// 1 where the dual clip, or GMPO's clip of negative advantages, bounded the loss.
    pub clipped_lower: Tensor<1>,
    /// Metrics of this loss alone.
    pub metrics: Vec<Metric>,
}

/// Inputs of a policy loss, `[tokens]` each.
pub(crate) struct Ratios<'a> {
    /// Log-prob under the current policy.
    pub logp: Tensor<1>,
    /// logp − old, token by token.
    pub difference: Tensor<1>,
    /// The log of the ratio at the configured level, clamped to ±20.
    pub log_ratio: Tensor<1>,
    /// The tokens' inputs.
    pub inputs: &'a TokenInputs,
    /// Bounds of sequences, for losses that do not separate.
    pub sequences: Option<&'a SequenceReduction>,
    /// Level of the ratio.
    pub level: ImportanceSamplingLevel,
}

impl Ratios<'_> {
    /// The terms of a loss that clips nothing.
    pub fn unclipped(&self, loss: Tensor<1>) -> PolicyTerms {
        let none = self.inputs.advantage().zeros_like();
        PolicyTerms { loss, clipped: none.clone(), clipped_lower: none, metrics: Vec::new() }
    }

    /// Bounds of sequences.
    pub fn sequences(&self) -> &SequenceReduction {
        self.sequences.expect("a loss that does not separate gets whole sequences")
    }

    /// A mean over what has a ratio: tokens, or sequences where all tokens of one have the same.
    pub fn mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        match self.level {
            ImportanceSamplingLevel::Token | ImportanceSamplingLevel::SequenceToken => Metric::token_mean(name, values),
            ImportanceSamplingLevel::Sequence | ImportanceSamplingLevel::SequenceProduct => {
                self.sequence_mean(name, values)
            }
        }
    }

    /// A mean over sequences of their tokens' means.
    pub fn sequence_mean(&self, name: &'static str, values: Tensor<1>) -> Metric {
        Metric { name, reduction: Reduction::SequenceMean, sum: self.sequences().mean(values.inner()).sum() }
    }
}

impl ImportanceSamplingLevel {
    /// The log of the probability ratio at this level for every token, within ±20; differentiable. `difference` is
    /// logp − old, `[tokens]`.
    pub(crate) fn log_ratio(self, difference: Tensor<1>, sequences: Option<&SequenceReduction>) -> Tensor<1> {
        let log_ratio = match (self, sequences) {
            (Self::Token, _) | (_, None) => difference,
            (Self::Sequence, Some(s)) => s.broadcast(s.mean(difference)),
            (Self::SequenceProduct, Some(s)) => s.broadcast(s.sum(difference)),
            (Self::SequenceToken, Some(s)) => {
                let mean = s.broadcast(s.mean(difference.clone().inner()));
                let detached = difference.clone().inner();
                difference + (mean - detached)
            }
        };
        log_ratio.clamp(-20.0, 20.0)
    }
}

/// A policy loss with its settings.
pub(crate) trait TokenPolicyLoss {
    /// The level of the probability ratio.
    fn level(&self) -> ImportanceSamplingLevel {
        ImportanceSamplingLevel::Token
    }

    /// Returns true if its terms apply the importance-sampling correction, so that they are not multiplied by it.
    fn takes_corrections(&self) -> bool {
        false
    }

    /// Returns true if it acts on tokens selected from a whole optimizer step.
    fn chooses_tokens(&self) -> bool {
        false
    }

    /// Returns true if it needs the bounds of sequences.
    fn looks_at_sequences(&self) -> bool {
        self.level() != ImportanceSamplingLevel::Token || self.takes_corrections()
    }

    /// The estimate of the KL between the old and the current policy that the loss reports, `[tokens]`, from logp −
    /// old.
    fn ppo_kl(&self, difference: Tensor<1>) -> Tensor<1> {
        difference.neg()
    }

    /// The loss of every token.
    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms;
}
