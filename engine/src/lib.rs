//! The trainer: tasks, rollouts, batches, objectives, plans, the segment schedule that executes them, checkpoints.
//!
//! The engine prints nothing: it reports through values, an [`Observer`](trainer::Observer) and `tracing`.

pub mod batch;
pub mod config;
pub mod critic;
pub mod data;
pub mod dataset;
pub mod demonstrations;
pub mod error;
pub mod evaluate;
pub mod gradients;
pub mod judge;
pub mod learner;
pub mod ledger;
pub mod lora;
pub mod metrics;
pub mod objective;
pub mod optim;
pub mod placed;
pub mod plan;
pub mod reward_model;
pub mod rollout;
pub mod run_dir;
pub mod runtime;
pub mod schedule;
pub mod source;
pub mod task;
pub mod trainer;
pub mod trainer_state;

pub use error::{Error, Result};
