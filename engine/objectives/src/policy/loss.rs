//! The policy losses as one type.

use super::cispo::Cispo;
use super::clip::Clip;
use super::cov::{ClipCov, KlCov};
use super::gmpo::Gmpo;
use super::reinforce::Reinforce;
use super::sapo::Sapo;
use super::terms::TokenPolicyLoss;
use super::vespo::Vespo;
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
