//! Bytes of a run by phase and category, and its time, from architecture, lengths and plan alone: no device, no
//! weights.
//!
//! One file an idea: [`sizes`] counts parameters, [`states`] weights and what the optimizer holds, [`activations`] what
//! a half of a layer keeps, `head` the logits, `train` is a micro-batch forward and backward, `sample` is rollout and
//! scoring, [`parallel`] several devices, `stages` those of a pipeline, [`time`] seconds, [`rules`] rules of thumb.
//! `docs/internals/planner.md` has the formulas in one place.

pub mod activations;
mod base;
mod communication;
mod context;
mod experts;
mod head;
mod kernel_time;
mod linear;
pub mod messages;
mod model_sizes;
mod numbers;
pub mod parallel;
mod pass_time;
mod phase;
mod phases;
mod public_models;
mod result;
pub mod rules;
mod sample;
mod sampling_time;
mod segment_totals;
pub mod sizes;
mod stages;
pub mod states;
pub mod time;
mod train;
pub mod unit_messages;
pub mod usage;
mod workload;

pub use crate::Zero;
pub(crate) use context::Context;
pub use messages::{Along, Communication, MessageKind, PhaseTraffic, Sent};
pub use parallel::Parallel;
pub use phase::EstimatePhase;
pub use phases::{estimate, estimate_parallel, estimate_stages};
pub use result::{Estimate, PhaseEstimate, Seconds};
pub(crate) use segment_totals::SegmentTotals;
pub use sizes::Sizes;
pub(crate) use stages::{StagePlans, Stages};
pub use workload::{CriticWork, Examples, RewardWork, WarmUp, Workload};

#[cfg(test)]
mod tests;
