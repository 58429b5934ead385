//! Rewards into advantages, per-token scores into a loss.
//!
//! Advantages are computed on plain slices, losses on vectors of token scores: an objective never sees a model. The
//! policy-gradient family is one composition, [`ObjectiveConfig`]: an advantage estimator, a policy loss, what it is
//! multiplied by, a KL term, an entropy bonus, and how tokens add up. Its [algorithms](Algorithm) are names for settings of it.

pub mod advantage;
pub mod aggregate;
mod algorithm;
mod check;
pub mod coefficients;
mod compute_advantages;
mod config;
pub mod correction;
pub mod entropy;
pub mod kl;
pub mod kl_controller;
mod loss;
mod loss_sums;
pub mod mismatch;
pub mod policy;
mod prepare;
mod presets;
pub mod rejection;
mod sequence_reduction;
pub mod sft;
mod token_loss;
mod traits;
pub mod value;

pub use algorithm::Algorithm;
pub use config::ObjectiveConfig;
pub(crate) use loss_sums::{LossAccumulator, split_by_sequence};
pub use loss_sums::{LossSums, MicroScores};
pub use token_loss::{Loss, Metric, Reduce, Scores, TokenInputs, TokenLoss};
pub use traits::{Needs, Objective, OptimizerStep};
