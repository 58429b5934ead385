//! The memory timeline of a run: bytes at every boundary of some steps, and the plan's predictions.
//!
//! [`MemoryTimeline`] is the file, [`Snapshots`] creates it, and [`TimelineReport`] summarizes it.

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
