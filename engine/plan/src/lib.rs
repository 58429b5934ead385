//! Memory plans as plain data, and the arithmetic that makes them: what each segment of a decoder keeps between forward and backward,
//! where every byte lives, in which order work visits the device; bytes and seconds of a plan; the fastest plan within a budget.
//!
//! No tensors, no devices, no Burn: a plan is made from an architecture, lengths and a device profile, for this machine or another one.
//! The engine's executor runs plans.

mod buffers;
mod check;
mod config;
mod critic;
mod cut;
pub mod error;
pub mod estimate;
mod plan;
pub mod planner;
mod preset;
pub mod saved;
pub mod size;
#[cfg(test)]
mod test_support;

pub use config::{Granularity, MemoryConfig, OptimizerOffload, Packing, ParamOffload, RoleMemory};
pub use error::{Error, Result};
pub use plan::{
    Keep, Layout, ModelPlan, MomentKind, OptimizerPlan, Order, Plan, Role, RolloutPlan, Segment,
};
pub use preset::Preset;
pub use saved::PlanReport;
