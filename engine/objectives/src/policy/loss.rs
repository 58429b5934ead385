//! The policy losses as one type.

use super::cispo::cispo;
use super::clip::{ClipRange, clip};
use super::cov::{ClipCov, KlCov, clip_cov, kl_cov};
use super::gmpo::gmpo;
use super::reinforce::reinforce;
use super::sapo::sapo;
use super::terms::{ImportanceSamplingLevel, PolicyTerms, Ratios};
use super::vespo::{Vespo, vespo};
use burn::tensor::Tensor;

/// The policy loss of every token, with its settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyLoss {
    /// PPO's clipped ratio (arXiv:1707.06347).
    Clip {
        /// What the ratio is of.
        level: ImportanceSamplingLevel,
        /// Where it is clipped.
        range: ClipRange,
        /// Dual clip (arXiv:1912.09729): with a negative advantage the loss is at most −A·c (verl's `clip_ratio_c`,
        /// TRL's `delta`).
        dual: Option<f64>,
    },
    /// The clipped ratio as a constant weight of the log-prob (arXiv:2506.13585).
    Cispo {
        /// What the ratio is of.
        level: ImportanceSamplingLevel,
        /// Where it is clipped.
        range: ClipRange,
    },
    /// A sigmoid gate of the ratio (arXiv:2511.20347).
    Sapo {
        /// What the ratio is of.
        level: ImportanceSamplingLevel,
        /// Temperature where the advantage is positive.
        tau_pos: f64,
        /// Temperature elsewhere.
        tau_neg: f64,
    },
    /// The geometric mean of a sequence's ratios (arXiv:2507.20673).
    GeoMean {
        /// Where the log of each token's ratio is clipped.
        range: ClipRange,
    },
    /// The log-prob itself.
    Reinforce,
    /// A KL penalty on the tokens of largest covariance (arXiv:2505.22617).
    KlCov(KlCov),
    /// Some tokens of large covariance left out (arXiv:2505.22617).
    ClipCov(ClipCov),
    /// A smooth weight of the ratio of whole sequences (arXiv:2602.10693).
    Vespo(Vespo),
}

impl PolicyLoss {
    /// What the probability ratio is of.
    pub(crate) fn level(&self) -> ImportanceSamplingLevel {
        match *self {
            Self::Clip { level, .. } | Self::Cispo { level, .. } | Self::Sapo { level, .. } => level,
            Self::GeoMean { .. } | Self::Reinforce | Self::KlCov(_) | Self::ClipCov(_) | Self::Vespo(_) => {
                ImportanceSamplingLevel::Token
            }
        }
    }

    /// Whether it needs to know where sequences begin and end.
    pub(crate) fn looks_at_sequences(&self) -> bool {
        self.level() != ImportanceSamplingLevel::Token || self.takes_corrections()
    }

    /// Whether it takes the importance-sampling correction into its own terms, so that they are not multiplied by it.
    pub(crate) fn takes_corrections(&self) -> bool {
        match self {
            Self::GeoMean { .. } | Self::Vespo(_) => true,
            Self::Clip { .. }
            | Self::Cispo { .. }
            | Self::Sapo { .. }
            | Self::Reinforce
            | Self::KlCov(_)
            | Self::ClipCov(_) => false,
        }
    }

    /// Whether it acts on tokens that are chosen out of a whole optimizer step.
    pub(crate) fn chooses_tokens(&self) -> bool {
        match self {
            Self::KlCov(_) | Self::ClipCov(_) => true,
            Self::Clip { .. }
            | Self::Cispo { .. }
            | Self::Sapo { .. }
            | Self::GeoMean { .. }
            | Self::Reinforce
            | Self::Vespo(_) => false,
        }
    }

    /// The estimate of the KL between the old and the current policy that the loss reports, `[tokens]`, from logp −
    /// old.
    pub(crate) fn ppo_kl(&self, difference: Tensor<1>) -> Tensor<1> {
        match self {
            Self::KlCov(_) => difference.abs(),
            Self::Clip { .. }
            | Self::Cispo { .. }
            | Self::Sapo { .. }
            | Self::GeoMean { .. }
            | Self::Reinforce
            | Self::ClipCov(_)
            | Self::Vespo(_) => difference.neg(),
        }
    }

    /// The loss of every token.
    pub(crate) fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        match *self {
            Self::Clip { range, dual, .. } => clip(range, dual, ratios),
            Self::Cispo { range, .. } => cispo(range, ratios),
            Self::Sapo { tau_pos, tau_neg, .. } => sapo(tau_pos, tau_neg, ratios),
            Self::GeoMean { range } => gmpo(range, ratios),
            Self::Reinforce => reinforce(ratios),
            Self::KlCov(by) => kl_cov(by.coefficient, ratios),
            Self::ClipCov(by) => clip_cov(by.range, ratios),
            Self::Vespo(by) => vespo(by, ratios),
        }
    }
}
