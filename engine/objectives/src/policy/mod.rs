//! Policy losses per token, before weights, corrections and masks: one file each.

mod cispo;
mod clip;
pub mod cov;
mod gmpo;
mod loss;
mod reinforce;
mod sapo;
mod terms;
mod vespo;

pub use cispo::Cispo;
pub use clip::{Clip, ClipRange};
pub use cov::{ClipCov, KlCov};
pub use gmpo::Gmpo;
pub use loss::PolicyLoss;
pub use sapo::Sapo;
pub use terms::{ImportanceSamplingLevel, PolicyTerms};
pub use vespo::Vespo;

pub(super) use terms::Ratios;
