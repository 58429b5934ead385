//! Memory plans as plain data, and the arithmetic that makes them: what each segment of a decoder keeps between forward
//! and backward, where every byte lives, in which order work visits the device; bytes and seconds of a plan; the
//! fastest plan within a budget.
//!
//! No tensors, no devices, no Burn: a plan is made from an architecture, lengths and a device profile, for this machine
//! or another one. The engine's executor runs plans.

#![forbid(unsafe_code)]

mod applied_preset;
mod config;
pub mod error;
pub mod estimate;
mod infeasible;
mod named;
mod options;
mod partition;
mod plan;
pub mod planner;
mod preset;
mod request;
mod resolve;
pub mod saved;
pub mod size;
mod technique;
mod techniques;
#[cfg(test)]
mod test_support;

pub use applied_preset::{AppliedPreset, DeviceAbilities, DroppedValue, PRECISION, SHARE};
pub use config::{CriticMemory, MemoryConfig, RoleMemory};
pub use error::{Error, Result};
pub use firebrick_spec::Role;
pub use infeasible::Infeasible;
pub use options::{Granularity, OptimizerOffload, Packing, ParamOffload, Zero};
pub use partition::Partition;
pub use plan::{
    ActivationPolicy, Layout, ModelPlan, MomentKind, OptimizerPlan, Order, Plan, RolloutPlan, Segment, sharing_pays,
};
pub use preset::Preset;
pub use saved::{PlanReport, PlannedFor};
pub use technique::{About, Technique, TechniqueKind};
pub use techniques::TECHNIQUES;
