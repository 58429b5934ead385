//! The `objective` section of a configuration: flat settings under verl's and TRL's names, and their conversion into a
//! [`PolicyGradient`](super::PolicyGradient), which rejects incompatible settings.

mod algorithm;
mod build;
mod config;
mod kl_control;
mod rejections;
mod rollout_rs;

pub use algorithm::Algorithm;
pub use config::{MultiObjectiveAggregation, ObjectiveConfig};
pub use kl_control::{KlControl, KlControlConfig};
pub use rollout_rs::{RejectionCriteria, RejectionThreshold, RejectionThresholds};
