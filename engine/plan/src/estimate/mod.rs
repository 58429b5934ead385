//! Bytes of a run by phase and category, and its time, from architecture, lengths and plan alone: no device, no
//! weights.
//!
//! - `bytes`: `sizes` counts parameters, `states` weights and what the optimizer holds, `activations` what a
//!   sublayer keeps, `head` the logits; `train` is a micro-batch forward and backward, `sample` rollout and scoring.
//! - `seconds`: time of each phase, by rates of the device or of its measured kernels.
//! - `messages`: what several devices send each other.
//! - [`parallel`]: several devices; `stages`: those of a pipeline. `phases` puts all of it together.
//!
//! `docs/internals/planner.md` has the formulas in one place.

mod bytes;
mod context;
pub mod messages;
mod model_sizes;
pub mod parallel;
mod phase;
mod phases;
mod public_models;
mod result;
pub mod rules;
pub(crate) mod seconds;
mod stages;
mod workload;

pub use crate::Zero;
pub use bytes::sizes::Sizes;
pub(crate) use context::Context;
pub use messages::{Axis, Communication, MessageKind, PhaseTraffic, Traffic};
pub use parallel::Parallel;
pub use phase::EstimatePhase;
pub use phases::{estimate, estimate_parallel, estimate_stages};
pub use result::{Estimate, PhaseEstimate, Seconds};
pub(crate) use seconds::segment_totals::SegmentTotals;
pub(crate) use stages::{StagePlans, Stages};
pub use workload::{CriticWork, Examples, RewardWork, WarmUp, Workload};

#[cfg(test)]
mod tests;
