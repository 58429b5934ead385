//! Creation of timelines from the boundary log of a run.

use super::format::{
    AccountBytes, Boundaries, FORMAT, MemoryTimeline, PlannedBytes, Reason, TimelinePhase, TraceEvents, TraceTable,
    VERSION,
};
use crate::executor::{BoundaryKind, BoundaryLog, BoundaryRows, Moment};
use crate::metrics::phase::Phase;
use crate::plan::estimate::PhaseEstimate;
use firebrick_backends::accounts::Account;
use firebrick_backends::allocation_trace::{MIN_BYTES, Trace, TraceEvent, TraceSource, function_names};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Parts of names of functions that allocate for their callers.
const ALLOCATING: [&str; 7] = [
    "backtrace::",
    "allocation_trace::",
    "firebrick_backends::allocator::",
    "__rust_",
    "__rustc",
    "alloc::alloc::",
    "alloc::raw_vec::",
];

/// Creates the timelines of a run.
#[derive(Debug)]
pub struct Snapshots {
    log: Arc<BoundaryLog>,
    device: String,
    unified: bool,
    /// Steps whose boundaries are all kept.
    steps: Range<u64>,
    written: bool,
    /// Predictions, each with the number of its first row.
    plans: Vec<(u64, Vec<PhaseEstimate>)>,
}

impl Snapshots {
    /// Snapshots of a run that continues after `finished` steps, with all boundaries of the next `snapshot` steps.
    /// `unified`: host and device share one memory.
    pub fn new(log: &Arc<BoundaryLog>, device: String, unified: bool, finished: u64, snapshot: u64) -> Self {
        let first = finished + 1;
        Self {
            log: Arc::clone(log),
            device,
            unified,
            steps: first..first.saturating_add(snapshot),
            written: false,
            plans: Vec::new(),
        }
    }

    /// Sets the prediction of the plan from now on.
    pub fn planned(&mut self, phases: Vec<PhaseEstimate>) {
        self.plans.push((self.log.taken(), phases));
    }

    /// Begins a step, whose boundaries are all kept for a timeline or if `keep_all` is true.
    pub fn begin_step(&self, step: u64, keep_all: bool) {
        self.log.begin_step(step, keep_all || self.steps.contains(&step));
    }

    /// Returns true if a timeline is requested and not written yet.
    pub fn is_owed(&self) -> bool {
        !self.steps.is_empty() && !self.written
    }

    /// Returns true if it is due after this step.
    pub fn is_due(&self, step: u64) -> bool {
        self.is_owed() && step + 1 >= self.steps.end
    }

    /// The timeline: of the requested steps, or of the latest boundaries if the run ends out of memory.
    pub fn timeline(&mut self, reason: Reason, error: Option<String>) -> MemoryTimeline {
        self.written = true;
        let mut rows = self.log.rows();
        if reason != Reason::OutOfMemory {
            let before = rows.rows.iter().take_while(|(row, _)| !self.steps.contains(&row.moment.step)).count();
            rows.rows.drain(..before);
            rows.first += before as u64;
            rows.dropped = if before > 0 { 0 } else { rows.dropped };
        }
        let mut names = Interner::new();
        let boundaries = boundaries(&rows, &mut names);
        let mut accounts = columns(&rows);
        let trace = self.log.trace();
        let trace = trace.map(|trace| {
            let moment = |event: &TraceEvent| self.log.moment(event.place);
            table(&trace, moment, &mut names, &mut accounts)
        });
        MemoryTimeline {
            format: FORMAT.into(),
            version: VERSION,
            reason,
            error,
            device: self.device.clone(),
            unified: self.unified,
            dropped: rows.dropped,
            phases: names.values.into_iter().map(timeline_phase).collect(),
            places: BoundaryKind::ALL.to_vec(),
            plans: self.plans(&rows),
            boundaries,
            accounts,
            trace,
        }
    }

    /// The plans of some rows.
    fn plans(&self, rows: &BoundaryRows) -> Vec<PlannedBytes> {
        let earlier = self.plans.iter().rposition(|(from, _)| *from <= rows.first);
        let end = rows.first + rows.rows.len() as u64;
        let plans = self.plans[earlier.unwrap_or(0)..].iter().filter(|(from, _)| *from <= end);
        let planned = plans.map(|(from, phases)| PlannedBytes {
            from: from.saturating_sub(rows.first) as usize,
            phases: phases.clone(),
        });
        planned.collect()
    }
}

/// Values in the order of their first use, with their indices.
struct Interner<T> {
    values: Vec<T>,
    indices: BTreeMap<T, usize>,
}

impl<T: Clone + Ord> Interner<T> {
    fn new() -> Self {
        Self { values: Vec::new(), indices: BTreeMap::new() }
    }

    fn index(&mut self, value: T) -> usize {
        *self.indices.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            self.values.len() - 1
        })
    }
}

fn timeline_phase(name: &str) -> TimelinePhase {
    let estimates = Phase::from_name(name).map_or(&[][..], Phase::estimates);
    TimelinePhase { name: name.to_owned(), estimates: estimates.to_vec() }
}

fn boundaries(rows: &BoundaryRows, names: &mut Interner<&'static str>) -> Boundaries {
    let mut columns = Boundaries::default();
    for (row, _) in &rows.rows {
        let boundary = row.moment.boundary;
        columns.step.push(row.moment.step);
        columns.phase.push(names.index(row.moment.phase));
        columns.place.push(boundary.place as usize);
        columns.segment.push(boundary.segment);
        // microseconds: more digits would be noise
        columns.seconds.push((row.seconds * 1e6).round() / 1e6);
        let reading = row.reading;
        columns.in_use_bytes.push(reading.map(|r| r.in_use_bytes));
        columns.peak_bytes.push(reading.and_then(|r| r.peak_bytes));
        columns.reserved_bytes.push(reading.map(|r| r.reserved_bytes));
    }
    columns
}

fn columns(rows: &BoundaryRows) -> Vec<AccountBytes> {
    let column = |(i, &account): (usize, &Account)| AccountBytes {
        account,
        bytes: rows.rows.iter().map(|(_, held)| held[i]).collect(),
    };
    let columns = rows.accounts.iter().enumerate().map(column);
    columns.filter(|column| column.bytes.iter().any(|&bytes| bytes > 0)).collect()
}

/// A trace for the file. Adds columns for accounts that had no bytes at any boundary.
fn table(
    trace: &Trace,
    moment: impl Fn(&TraceEvent) -> Option<Moment>,
    names: &mut Interner<&'static str>,
    accounts: &mut Vec<AccountBytes>,
) -> TraceTable {
    let rows = accounts.first().map_or(0, |column| column.bytes.len());
    let mut stacks = Stacks::of(trace);
    let mut events = TraceEvents::default();
    let mut ids: BTreeMap<u64, u64> = BTreeMap::new();
    let mut allocations = 0;
    for event in &trace.events {
        let id = if event.released {
            ids.remove(&event.key)
        } else {
            ids.insert(event.key, allocations);
            allocations += 1;
            Some(allocations - 1)
        };
        let account = event.account.map(|account| {
            let known = accounts.iter().position(|column| column.account == account);
            known.unwrap_or_else(|| {
                let bytes = vec![0; rows];
                accounts.push(AccountBytes { account, bytes });
                accounts.len() - 1
            })
        });
        let moment = moment(event);
        events.released.push(u8::from(event.released));
        events.id.push(id);
        events.bytes.push(event.bytes);
        events.step.push(moment.map_or(0, |m| m.step));
        events.phase.push(moment.map(|m| names.index(m.phase)));
        events.place.push(moment.map(|m| m.boundary.place as usize));
        events.segment.push(moment.and_then(|m| m.boundary.segment));
        events.account.push(account);
        events.stack.push(stacks.index(event.stack()));
    }
    TraceTable {
        source: trace.source,
        least_bytes: match trace.source {
            TraceSource::Heap => MIN_BYTES as u64,
            TraceSource::Accounts => 0,
        },
        dropped: trace.dropped,
        functions: stacks.functions.values,
        stacks: stacks.known.values,
        events,
    }
}

/// Distinct call stacks by function names.
struct Stacks {
    /// Indices of the functions at each address.
    frames: BTreeMap<usize, Vec<usize>>,
    functions: Interner<String>,
    known: Interner<Vec<usize>>,
}

impl Stacks {
    /// Resolves every address of a trace.
    fn of(trace: &Trace) -> Self {
        let addresses = trace.events.iter().flat_map(TraceEvent::stack).copied();
        let mut functions = Interner::new();
        let named = function_names(addresses).into_iter();
        let frames =
            named.map(|(address, names)| (address, names.into_iter().map(|name| functions.index(name)).collect()));
        Self { frames: frames.collect(), functions, known: Interner::new() }
    }

    /// Index of a stack without allocating functions; `None` of one without names.
    fn index(&mut self, addresses: &[usize]) -> Option<usize> {
        let allocates = |&function: &usize| {
            let name = &self.functions.values[function];
            ALLOCATING.iter().any(|part| name.contains(part))
        };
        let named = addresses.iter().filter_map(|address| self.frames.get(address));
        let stack: Vec<usize> = named.flatten().copied().skip_while(allocates).collect();
        (!stack.is_empty()).then(|| self.known.index(stack))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::Boundary;
    use crate::metrics::TimelineReport;
    use crate::plan::estimate::EstimatePhase;
    use firebrick_backends::accounts::{Accounts, Category, Home};

    fn estimate(total_bytes: u64) -> PhaseEstimate {
        PhaseEstimate {
            stage: None,
            name: EstimatePhase::Backward,
            total_bytes,
            host_bytes: 0,
            moment: String::new(),
            categories: BTreeMap::new(),
        }
    }

    #[test]
    fn a_timeline_has_the_steps_that_were_asked_for_and_the_plans_that_were_in_force() {
        let accounts = Accounts::new();
        let log = BoundaryLog::new(&accounts, None);
        let mut snapshots = Snapshots::new(&log, "cpu".into(), true, 5, 2);
        snapshots.planned(vec![estimate(10)]);
        log.begin_phase(0, "testing", None);
        let _held = accounts.hold(Category::Parameters, Home::Device, 8);
        for step in 6..8 {
            assert!(snapshots.is_owed());
            snapshots.begin_step(step, false);
            log.begin_phase(step, "update_actor", None);
            log.record(Boundary::at(BoundaryKind::Forward, 1), None);
            if step == 7 {
                snapshots.planned(vec![estimate(20)]);
                log.record(BoundaryKind::Replanned, None);
            }
            assert_eq!(snapshots.is_due(step), step == 7);
        }
        let timeline = snapshots.timeline(Reason::Snapshot, None);
        assert_eq!(timeline.boundaries.step, [6, 6, 7, 7, 7]);
        assert_eq!(timeline.accounts[0].bytes, [8; 5]);
        let plans: Vec<_> = timeline.plans.iter().map(|plan| (plan.from, plan.phases[0].total_bytes)).collect();
        assert_eq!(plans, [(0, 10), (4, 20)]);
        assert_eq!(timeline.phases[0].estimates, [EstimatePhase::Backward, EstimatePhase::Optimizer]);
        assert!(!snapshots.is_owed() && !snapshots.is_due(7));
        let peak = TimelineReport::new(&timeline).peak.expect("a peak");
        assert_eq!((peak.bytes, peak.predicted_bytes), (8, Some(10)));

        let timeline = snapshots.timeline(Reason::OutOfMemory, Some("too much".into()));
        assert_eq!(timeline.boundaries.step, [0, 6, 6, 7, 7, 7]);
        assert_eq!(timeline.plans[1].from, 5);
        let text = timeline.to_json().expect("JSON");
        let path = std::path::Path::new("memory_timeline.json");
        assert_eq!(MemoryTimeline::parse(&text, path).expect("it is one"), timeline);
    }

    #[test]
    fn without_memory_snapshot_nothing_is_owed() {
        let log = BoundaryLog::new(&Accounts::new(), None);
        let snapshots = Snapshots::new(&log, "cpu".into(), true, 0, 0);
        assert!(!snapshots.is_owed() && !snapshots.is_due(1));
    }

    #[test]
    fn an_update_is_predicted_by_two_phases_of_the_estimate() {
        assert_eq!(Phase::UpdateActor.estimates(), [EstimatePhase::Backward, EstimatePhase::Optimizer]);
    }
}
