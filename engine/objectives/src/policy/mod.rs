//! Policy losses per token, before weights, corrections and masks: one file each, and their choice.

mod cispo;
mod clip;
pub mod cov;
mod gmpo;
mod reinforce;
mod sapo;
mod terms;
mod vespo;

pub use cispo::Cispo;
pub use clip::{Clip, ClipRange};
pub use cov::{ClipCov, KlCov};
pub use gmpo::Gmpo;
pub use sapo::Sapo;
pub use terms::{ImportanceSamplingLevel, PolicyTerms};
pub use vespo::Vespo;

pub(super) use terms::Ratios;

use reinforce::Reinforce;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use terms::TokenPolicyLoss;

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
