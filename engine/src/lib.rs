//! The trainer: tasks, rollouts, batches, objectives, plans, the executor that runs them, checkpoints.
//!
//! The engine prints nothing: it reports through values, an [`Observer`](metrics::Observer) and `tracing`.

#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod data;
pub mod metrics;
pub mod planning;
pub mod reward;
pub mod trainer;
pub mod turns;

use firebrick_data::process;

pub use firebrick_core::{Error, Result, error, lr_scheduler, rollout, sequence, world};
pub use firebrick_data::{hub, task};
pub use firebrick_executor::{self as executor, batch, learner, optim};
pub use firebrick_objectives as objective;
pub use firebrick_plan as plan;
