//! The trainer: tasks, rollouts, batches, objectives, plans, the executor that runs them, checkpoints.
//!
//! The engine prints nothing: it reports through values, an [`Observer`](metrics::Observer) and `tracing`.

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod error;
pub mod executor;
pub mod hub;
pub mod learner;
pub mod lr_scheduler;
pub mod metrics;
pub mod objective;
pub mod optim;
pub mod planning;
mod process;
pub mod report;
pub mod reward;
pub mod rollout;
pub mod sequence;
pub mod task;
pub mod trainer;
pub mod turns;
pub mod world;

pub use error::{Error, Result};
pub use firebrick_plan as plan;
