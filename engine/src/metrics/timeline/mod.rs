//! The memory timeline of a run: what was held at every boundary of some steps, beside what the plan predicted.
//!
//! [`MemoryTimeline`] is the file, [`Snapshots`] makes it of a run, and [`TimelineReport`] says what stands out in it.

mod format;
mod live;
mod report;
mod snapshots;
#[cfg(test)]
mod tests;

pub use format::{
    AccountBytes, Boundaries, FORMAT, MemoryTimeline, PlannedBytes, Reason, TimelinePhase, TraceEvents, TraceTable,
    VERSION,
};
pub use live::{LiveAllocations, LiveGroup};
pub use report::{CategoryBytes, Holder, PeakReport, PhasePeak, TimelineReport, When};
pub use snapshots::Snapshots;
