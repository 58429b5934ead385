//! Policy losses per token: what is minimised, before weights, corrections and masks. A loss a page.

mod cispo;
mod clip;
pub mod cov;
mod gmpo;
mod loss;
mod reinforce;
mod sapo;
mod terms;
mod vespo;

pub use clip::Clip;
pub use loss::PolicyLoss;
pub use terms::{ImportanceSamplingLevel, PolicyTerms};

pub(super) use terms::Ratios;
