//! The optimizer: `AdamW` with moments in f32, bf16 or 8-bit blocks, on the device or the host.

pub mod adamw;
pub mod block8;
pub mod config;
pub mod host;
mod moments;
mod replan;
mod reserve;
pub mod scale;
mod sharded;
mod state;

pub use adamw::{AdamW, StepInBackward, StepOutcome};
pub use config::OptimConfig;
pub use scale::{LossScale, Scaler};
