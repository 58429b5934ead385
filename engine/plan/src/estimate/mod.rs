//! Bytes of a run by phase and category, and its time, from architecture, lengths and plan alone: no device, no
//! weights.
//!
//! - `bytes`: `sizes` counts parameters, `states` weights and what the optimizer holds, `activations` what a
//!   sublayer keeps; `train` is a micro-batch forward and backward, `sample` rollout and scoring.
//! - `moment`: what passes and updates ask techniques about, whose files have the formulas of what they alone decide.
//! - `seconds`: time of each phase, by rates of the device or of its measured kernels.
//! - `messages`: what several devices send each other.
//! - [`parallel`]: several devices; `stages`: those of a pipeline. `phases` puts all of it together.
//!
//! `docs/internals/planner.md` has the formulas in one place.

mod bytes;
mod context;
pub mod messages;
mod model_sizes;
mod moment;
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
pub(crate) use crate::techniques::head_rows::HeadCost;
pub(crate) use bytes::activations::{Cached, LayerWidths, Shape};
pub(crate) use bytes::elements::{Bypass, Elements};
pub(crate) use bytes::experts::{ExpertSizes, ExpertWidths, LayerSet};
pub(crate) use bytes::linear::LinearWidths;
pub(crate) use bytes::quantized_base::{BaseSizes, SUBLAYERS};
pub use bytes::sizes::Sizes;
pub(crate) use bytes::sizes::{F32, QuantizedWeights, Sublayer};
pub(crate) use bytes::states::{Activity, ModelState};
pub(crate) use bytes::usage::{MemoryUsage, PeakUsage};
pub(crate) use context::Context;
pub(crate) use messages::Group;
pub(crate) use messages::weights::{ModelMessages, TrainingMessages, UnitMessages};
pub use messages::{Axis, Communication, MessageKind, PhaseTraffic, Traffic};
pub(crate) use model_sizes::ModelSizes;
pub(crate) use moment::{Moment, TrainingPass, Transfers, Update, Visit};
pub use parallel::Parallel;
pub use phase::EstimatePhase;
pub use phases::{estimate, estimate_parallel, estimate_stages};
pub use result::{Estimate, PhaseEstimate, Seconds};
pub(crate) use seconds::kernels::Work;
pub(crate) use seconds::segment_totals::SegmentTotals;
pub(crate) use stages::{StagePlans, Stages};
pub(crate) use workload::Tree;
pub use workload::{CriticWork, Examples, RewardWork, WarmUp, Workload};

#[cfg(test)]
mod tests;
