//! Optimizers and learning-rate schedules.

pub mod adamw;
pub mod block8;
pub mod config;
pub mod host;
mod moments;
pub mod scale;
pub mod schedule;
mod state;

pub use adamw::{AdamW, StepInBackward, StepOutcome};
pub use config::OptimConfig;
pub use scale::{LossScale, Scaler};
