//! Optimizers and learning-rate schedules.

pub mod adamw;
pub mod schedule;

pub use adamw::{AdamW, OptimConfig};
