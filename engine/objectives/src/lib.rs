//! Rewards into advantages, per-token scores into a loss.
//!
//! Advantages are computed on plain slices, losses on vectors of token scores: an objective never sees a model. The
//! trainer knows the trait [`Objective`]. This crate implements it once: [`PolicyGradient`] composes an advantage
//! estimator, a policy loss, masks and corrections, KL terms, an entropy bonus, and an aggregation. [`ObjectiveConfig`]
//! has its flat settings, as configuration files write them, and [`Algorithm`] the names of algorithms, which stand for
//! settings.

#![forbid(unsafe_code)]

pub mod advantage;
pub mod aggregate;
pub mod coefficients;
pub mod correction;
pub mod entropy;
pub mod kl;
pub mod kl_controller;
mod loss_sums;
pub mod mismatch;
pub mod policy;
mod policy_gradient;
pub mod rejection;
mod sequence_reduction;
mod settings;
pub mod sft;
mod token_loss;
mod traits;
pub mod value;

pub use coefficients::AdaptiveCoefficients;
pub use loss_sums::{LossSums, MicroScores, ROUTER_AUX_LOSS};
pub use policy_gradient::{Advantages, PolicyGradient};
pub use sequence_reduction::SequenceReduction;
pub use settings::{
    Algorithm, KlControl, KlControlConfig, MultiObjectiveAggregation, ObjectiveConfig, RejectionCriteria,
    RejectionThreshold, RejectionThresholds,
};
pub use token_loss::{Loss, Metric, Reduction, Scores, TokenInputs, TokenLoss};
pub use traits::{Needs, Objective, OptimizerStep};
