//! The file `memory_timeline.json`: columns of numbers, names once. `docs/reference/run_folder.md` describes it.

use crate::executor::BoundaryKind;
use crate::plan::estimate::{EstimatePhase, PhaseEstimate};
use crate::{Error, Result};
use firebrick_backends::accounts::Account;
use firebrick_backends::allocation_trace::TraceSource;
use firebrick_spec::file::{MAX_TEXT_BYTES, read_text};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::Path;

/// Value of [`MemoryTimeline::format`].
pub const FORMAT: &str = "firebrick.memory_timeline";

/// Version of the format that is written, and the newest one that is read.
pub const VERSION: u64 = 1;

/// Reason for writing a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The steps of `memory.snapshot` are over.
    Snapshot,
    /// The run ended before they were.
    Ended,
    /// The run ended out of memory.
    OutOfMemory,
    /// The run ended with another error before the steps of `memory.snapshot` were over.
    Failed,
}

/// A timeline: boundaries, bytes of all accounts at them, and predictions.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct MemoryTimeline {
    /// [`FORMAT`].
    pub format: String,
    /// [`VERSION`].
    pub version: u64,
    /// Reason for writing it.
    pub reason: Reason,
    /// The error that ended the run.
    pub error: Option<String>,
    /// Device, with its name.
    pub device: String,
    /// True for unified memory: host bytes are bytes of the device.
    pub unified: bool,
    /// Missing boundaries at the beginning of the first step.
    pub dropped: u64,
    /// Phases, to which other columns refer by index.
    pub phases: Vec<TimelinePhase>,
    /// Places, to which other columns refer by index.
    pub places: Vec<BoundaryKind>,
    /// Boundaries of the readings.
    pub boundaries: Boundaries,
    /// Bytes of the accounts at each boundary.
    pub accounts: Vec<AccountBytes>,
    /// Plans and their predictions.
    pub plans: Vec<PlannedBytes>,
    /// Trace of the last allocations, if there is one.
    pub trace: Option<TraceTable>,
}

/// A phase, and the phases of the estimate that predict its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct TimelinePhase {
    /// Name, as in `memory.jsonl`.
    pub name: String,
    /// Names in [`PlannedBytes::phases`], the largest of which is its prediction.
    pub estimates: Vec<EstimatePhase>,
}

macro_rules! columns {
    ($(#[$doc:meta])+ $name:ident { $($(#[$column_doc:meta])+ $column:ident: $type:ty,)+ }) => {
        $(#[$doc])+
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
        pub struct $name {
            $($(#[$column_doc])+ pub $column: Vec<$type>,)+
        }

        impl $name {
            /// Number of rows.
            pub fn len(&self) -> usize {
                self.lengths()[0].1
            }

            /// Returns true if there is no row.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Selected rows.
            #[must_use]
            pub fn at(&self, rows: &[usize]) -> Self {
                Self { $($column: rows.iter().map(|&row| self.$column[row]).collect(),)+ }
            }

            /// The columns, each with its number of rows.
            fn lengths(&self) -> [(&'static str, usize); [$(stringify!($column)),+].len()] {
                [$((stringify!($column), self.$column.len())),+]
            }
        }
    };
}

columns! {
    /// Columns of equal length, one number for each boundary, oldest first.
    Boundaries {
        /// Training step; 0 before the first.
        step: u64,
        /// Index of the phase.
        phase: usize,
        /// Index of the place.
        place: usize,
        /// Index of the segment; of the decoder's unit at `update`.
        segment: Option<u32>,
        /// Seconds since the step began.
        seconds: f64,
        /// Bytes in use on the device (on the CPU: on the counted heap), unless reading them would wait for the device.
        in_use_bytes: Option<u64>,
        /// Peak bytes in use since the phase began, if the source records it.
        peak_bytes: Option<u64>,
        /// Reserved bytes of the pools, with free pages.
        reserved_bytes: Option<u64>,
    }
}

/// Bytes of an account at each boundary.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct AccountBytes {
    /// Account.
    #[serde(flatten)]
    pub account: Account,
    /// Bytes.
    pub bytes: Vec<u64>,
}

/// Prediction of a plan.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PlannedBytes {
    /// Index of the first boundary under this plan.
    pub from: usize,
    /// Bytes by phase of the estimate and category.
    pub phases: Vec<PhaseEstimate>,
}

/// The last allocations and releases.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct TraceTable {
    /// Source of the trace.
    pub source: TraceSource,
    /// Minimum size of a traced allocation.
    pub least_bytes: u64,
    /// Older events, for which there was no room.
    pub dropped: u64,
    /// Names of functions.
    pub functions: Vec<String>,
    /// Call stacks as indices of functions, the innermost first.
    pub stacks: Vec<Vec<usize>>,
    /// The events.
    pub events: TraceEvents,
}

columns! {
    /// Columns of equal length, one number for each event, oldest first.
    TraceEvents {
        /// 0: an allocation, 1: a release.
        released: u8,
        /// Number of the allocation, also of its release; `None` of a release whose allocation is not in the trace.
        id: Option<u64>,
        /// Size in bytes.
        bytes: u64,
        /// Step of the boundary before it; 0 before the first.
        step: u64,
        /// Index of the phase of that boundary; `None` before the first.
        phase: Option<usize>,
        /// Index of the place of that boundary.
        place: Option<usize>,
        /// Segment of that boundary.
        segment: Option<u32>,
        /// Index of the account, if known.
        account: Option<usize>,
        /// Index of the call stack, if known.
        stack: Option<usize>,
    }
}

impl MemoryTimeline {
    /// The file's name in the run folder.
    pub const FILE: &'static str = "memory_timeline.json";

    /// The text of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Timeline`] if a number cannot be written as JSON.
    pub fn to_json(&self) -> Result<String> {
        let text = serde_json::to_string(self);
        let mut text = text.map_err(|e| bad(Path::new(Self::FILE), e.to_string()))?;
        text.push('\n');
        Ok(text)
    }

    /// Reads the timeline of a run folder.
    ///
    /// # Errors
    ///
    /// [`Error::Timeline`] if there is no run or no timeline in it, or the file is invalid.
    pub fn load(run: &Path) -> Result<Self> {
        if !run.is_dir() {
            return Err(bad(run, "there is no such run folder".into()));
        }
        let path = run.join(Self::FILE);
        let text = match read_text(&path, MAX_TEXT_BYTES) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Err(Self::missing(run)),
            // not UTF-8
            Err(e) if e.kind() == ErrorKind::InvalidData => {
                return Err(bad(&path, format!("it is not JSON: {e}")));
            }
            Err(e) => return Err(Error::io("read", path)(e)),
        };
        Self::parse(&text, &path)
    }

    fn missing(run: &Path) -> Error {
        let detail = if run.join("config.yaml").is_file() {
            "the run has no memory_timeline.json: it is written for the first N steps with memory.snapshot=N, and when a run \
             ends out of memory"
        } else {
            "it contains no run (no config.yaml)"
        };
        bad(run, detail.into())
    }

    /// Reads the text of a file; `path` is for messages.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self> {
        let file: Value = serde_json::from_str(text).map_err(|e| {
            let detail = if e.is_eof() { format!("it is truncated: {e}") } else { format!("it is not JSON: {e}") };
            bad(path, detail)
        })?;
        if file["format"] != FORMAT {
            let detail = format!("it is not a memory timeline: `format` is not {FORMAT:?}");
            return Err(bad(path, detail));
        }
        match file["version"].as_u64() {
            Some(1..=VERSION) => {}
            Some(newer) if newer > VERSION => {
                let detail = format!(
                    "its format has version {newer}, and this program reads up to {VERSION}; use the newer Firebrick that wrote it"
                );
                return Err(bad(path, detail));
            }
            _ => return Err(bad(path, "`version` is not an integer of at least 1".into())),
        }
        let timeline: Self =
            serde_path_to_error::deserialize(file).map_err(|e| bad(path, format!("{}: {}", e.path(), e.inner())))?;
        match timeline.inconsistency() {
            Some(detail) => Err(bad(path, detail)),
            None => Ok(timeline),
        }
    }

    /// Inconsistency of the columns: different lengths, or indices out of range.
    fn inconsistency(&self) -> Option<String> {
        let b = &self.boundaries;
        let (rows, phases, places) = (b.len(), self.phases.len(), self.places.len());
        let accounts = self.accounts.iter().map(|a| ("accounts.bytes", a.bytes.len()));
        let mut columns = b.lengths().into_iter().chain(accounts);
        if let Some((name, len)) = columns.find(|(_, len)| *len != rows) {
            return Some(format!("{name} has {len} values for {rows} boundaries"));
        }
        let within = |indices: &[usize], count: usize| indices.iter().all(|&i| i < count);
        let plans: Vec<usize> = self.plans.iter().map(|plan| plan.from).collect();
        let indices = [
            ("boundaries.phase", within(&b.phase, phases)),
            ("boundaries.place", within(&b.place, places)),
            ("plans.from", within(&plans, rows + 1)),
        ];
        if let Some((name, _)) = indices.iter().find(|(_, fits)| !fits) {
            return Some(format!("{name} has an index of nothing"));
        }
        let trace = self.trace.as_ref()?;
        trace.inconsistency(phases, places, self.accounts.len())
    }

    /// The steps that have boundaries, in order.
    pub fn steps(&self) -> Vec<u64> {
        let mut steps = self.boundaries.step.clone();
        steps.dedup();
        steps
    }
}

impl TraceTable {
    fn inconsistency(&self, phases: usize, places: usize, accounts: usize) -> Option<String> {
        let e = &self.events;
        if let Some((name, len)) = e.lengths().iter().find(|(_, len)| *len != e.len()) {
            return Some(format!("trace.events.{name} has {len} values for {} events", e.len()));
        }
        let within = |column: &[Option<usize>], count| column.iter().flatten().all(|&i| i < count);
        let frames = self.stacks.iter().flatten();
        let indices = [
            ("events.phase", within(&e.phase, phases)),
            ("events.place", within(&e.place, places)),
            ("events.account", within(&e.account, accounts)),
            ("events.stack", within(&e.stack, self.stacks.len())),
            ("stacks", frames.max().is_none_or(|&i| i < self.functions.len())),
        ];
        let wrong = indices.iter().find(|(_, fits)| !fits);
        wrong.map(|(name, _)| format!("trace.{name} has an index of nothing"))
    }
}

fn bad(path: &Path, detail: String) -> Error {
    Error::Timeline { path: path.to_owned(), detail }
}
