//! The `objective` section of a configuration: flat settings under verl's and TRL's names, and their conversion into a
//! [`PolicyGradient`](super::PolicyGradient), which refuses what does not go together.

mod algorithm;
mod build;
mod choices;
mod config;
mod kl_control;
mod presets;
mod reader;
mod rejections;
mod rollout_rs;

pub use algorithm::Algorithm;
pub use choices::{AdvEstimator, MultiObjectiveAggregation, PolicyLossMode, RolloutIs};
pub use config::ObjectiveConfig;
pub use kl_control::{KlControl, KlControlConfig};
pub use rollout_rs::{RejectionCriteria, RejectionThreshold, RejectionThresholds};
