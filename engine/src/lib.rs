//! The trainer: tasks, rollouts, batches, objectives, plans, the segment schedule that executes them, checkpoints.
//!
//! The engine prints nothing: it reports through values, an [`Observer`](trainer::Observer) and `tracing`.

pub mod batch;
pub mod error;
pub mod gradients;
pub mod objective;
pub mod optim;
pub mod plan;
pub mod rollout;
pub mod schedule;
pub mod task;

pub use error::{Error, Result};
