//! Types that all parts of the engine use: ranks, sequences, rollouts, learning-rate schedules, errors.

#![forbid(unsafe_code)]

pub mod error;
pub mod lr_scheduler;
pub mod message;
pub mod rollout;
pub mod sequence;
pub mod world;

pub use error::{Error, Result};
