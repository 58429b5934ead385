//! Reports of a run.
//!
//! A [`StepReport`] has the facts of a step, and [`metrics()`] is a pure function from it to named values. The
//! [`Recorder`] writes them into the run folder and sends them to the [`Observer`] and every [`Tracker`]. The
//! [`Ledger`] reads memory at the ends of phases; a [`MemoryTimeline`] has the bytes at every boundary of some steps.

mod described;
mod events;
mod expert_load;
pub mod ledger;
mod names;
mod phase;
pub mod profile;
mod recorder;
mod report;
mod step_values;
mod summary;
pub mod timeline;
mod token_log;
pub mod tracker;
mod validation;
mod warnings;

pub use described::{Described, GLOBAL_STEP, METRICS, Metrics, described};
pub use events::{Control, Event, Observer, Silent};
pub use expert_load::ExpertLoad;
pub use ledger::{Growth, Leak, Ledger, LedgerEntry};
pub use names::{
    is_of_a_machine, judged_metrics, metrics, timings, validation_metrics, validation_reward, validation_unjudged,
};
pub use phase::{Phase, PhaseTimings};
pub use recorder::Recorder;
pub use report::{
    Mean, ProgramStats, RankWaits, RolloutReport, RolloutStats, StepMemory, StepReport, UpdateReport, ValidationReport,
};
pub use summary::{PhaseMemory, Summary, phase_memory};
pub use timeline::{MemoryTimeline, Snapshots, TimelineReport};
pub use token_log::{TokenLog, TokenRecord, TokenSettings};
pub use tracker::{TrackedRun, Tracker, TrackerResult};
pub use validation::JudgedSample;
