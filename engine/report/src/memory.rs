//! `memory.jsonl` and the memory timeline.

use super::lines::{self, ReadResult};
use firebrick_backends::memory::ReadingSource;
use firebrick_engine::Result;
use firebrick_engine::executor::BoundaryKind;
use firebrick_engine::metrics::timeline::{AccountBytes, Boundaries, PlannedBytes, TimelinePhase};
use firebrick_engine::metrics::{LedgerEntry, MemoryTimeline, Phase, TimelineReport};
use firebrick_engine::plan::estimate::EstimatePhase;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Most readings of a phase in a report; beyond it, a reading is the largest of several consecutive steps.
const MAX_READINGS: usize = 1000;

/// Most boundaries in a report; beyond it, a row is the largest of several consecutive ones.
const MAX_BOUNDARIES: usize = 3000;

/// Most groups of live allocations in a report.
const MAX_LIVE_GROUPS: usize = 20;

/// Memory of a run's phases.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MemoryReadings {
    /// Source of the numbers, from `memory.jsonl`.
    pub source: ReadingSource,
    /// Steps per reading, of which it is the largest.
    pub steps_each: usize,
    /// By phase, in the order in which they first ran.
    pub phases: Vec<PhaseReadings>,
}

/// Memory of a phase by step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseReadings {
    /// The phase.
    pub name: Phase,
    /// The phases of the estimate that predict its bytes: the largest of them does.
    pub estimates: &'static [EstimatePhase],
    /// The steps that it ran in.
    pub steps: Vec<u64>,
    /// Bytes in use at its end.
    pub in_use_bytes: Vec<u64>,
    /// Most bytes in use while it ran, if the source records it.
    pub peak_bytes: Vec<Option<u64>>,
    /// Bytes that the pools held at its end.
    pub reserved_bytes: Vec<u64>,
    /// Peaks of its accounts, each at its own time.
    pub accounts: Vec<AccountSeries>,
}

/// An account of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AccountSeries {
    /// Category.
    pub category: &'static str,
    /// Device or host.
    pub home: &'static str,
    /// Most bytes in each step.
    pub peak_bytes: Vec<u64>,
}

/// The timeline without its trace, with its summary.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineView {
    /// True if host and device share one memory.
    pub unified: bool,
    /// Boundaries per row, of which it is the largest.
    pub boundaries_each: usize,
    /// Phases.
    pub phases: Vec<TimelinePhase>,
    /// Names of places.
    pub places: Vec<BoundaryKind>,
    /// Boundaries.
    pub boundaries: Boundaries,
    /// Bytes by account.
    pub accounts: Vec<AccountBytes>,
    /// Plans.
    pub plans: Vec<PlannedBytes>,
    /// The output of `firebrick memory`.
    pub report: TimelineReport,
}

/// The largest of a phase's readings in some steps.
#[derive(Clone, Debug, Default, PartialEq)]
struct Largest {
    in_use: u64,
    peak: Option<u64>,
    reserved: u64,
    /// By the names of category and home.
    accounts: BTreeMap<(&'static str, &'static str), u64>,
}

impl Largest {
    fn merge(&mut self, other: Self) {
        self.in_use = self.in_use.max(other.in_use);
        self.peak = self.peak.max(other.peak);
        self.reserved = self.reserved.max(other.reserved);
        for (key, bytes) in other.accounts {
            let most = self.accounts.entry(key).or_default();
            *most = (*most).max(bytes);
        }
    }
}

impl From<&LedgerEntry> for Largest {
    fn from(entry: &LedgerEntry) -> Self {
        Self {
            in_use: entry.reading.in_use_bytes,
            peak: entry.reading.peak_bytes,
            reserved: entry.reading.reserved_bytes,
            accounts: entry
                .accounts
                .iter()
                .map(|account| ((account.category.name(), account.home.name()), account.peak_bytes))
                .collect(),
        }
    }
}

/// Readings of phases by step, the phases in the order in which they first ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryHistory {
    source: Option<ReadingSource>,
    phases: Vec<(Phase, BTreeMap<u64, Largest>)>,
}

impl MemoryHistory {
    /// Reads a run's `memory.jsonl`.
    pub(super) fn read(path: &Path) -> Result<(Self, ReadResult)> {
        let mut history = Self::default();
        let result = lines::read(path, |entry: LedgerEntry, _| {
            history.add(&entry);
            true
        })?;
        Ok((history, result))
    }

    /// Adds a reading.
    pub fn add(&mut self, entry: &LedgerEntry) {
        self.source = Some(entry.reading.source);
        let known = self.phases.iter().position(|(phase, _)| *phase == entry.phase);
        let at = known.unwrap_or_else(|| {
            self.phases.push((entry.phase, BTreeMap::new()));
            self.phases.len() - 1
        });
        self.phases[at].1.entry(entry.step).or_default().merge(entry.into());
    }

    /// Drops all but the newest step of each phase.
    pub fn keep_newest(&mut self) {
        for (_, steps) in &mut self.phases {
            let newest = steps.last_key_value().map_or(0, |(step, _)| *step);
            steps.retain(|step, _| *step == newest);
        }
    }

    /// Most bytes of a phase in the newest step that has it.
    pub fn newest_bytes(&self, phase: Phase) -> Option<u64> {
        let (_, steps) = self.phases.iter().find(|(known, _)| *known == phase)?;
        steps.last_key_value().map(|(_, largest)| largest.peak.unwrap_or(largest.in_use))
    }

    /// The readings for a report; `None` without any.
    pub fn readings(self) -> Option<MemoryReadings> {
        let source = self.source?;
        let most = self.phases.iter().map(|(_, steps)| steps.len()).max()?;
        let steps_each = most.div_ceil(MAX_READINGS);
        let phases = self.phases.into_iter().map(|(phase, steps)| series(phase, steps, steps_each));
        Some(MemoryReadings { source, steps_each, phases: phases.collect() })
    }
}

fn series(phase: Phase, steps: BTreeMap<u64, Largest>, steps_each: usize) -> PhaseReadings {
    let mut rows: Vec<(u64, Largest)> = Vec::new();
    for (at, (step, largest)) in steps.into_iter().enumerate() {
        match rows.last_mut() {
            Some((_, last)) if at % steps_each != 0 => last.merge(largest),
            _ => rows.push((step, largest)),
        }
    }
    let keys: BTreeSet<_> = rows.iter().flat_map(|(_, row)| row.accounts.keys().copied()).collect();
    let accounts = keys.into_iter().map(|key| AccountSeries {
        category: key.0,
        home: key.1,
        peak_bytes: rows.iter().map(|(_, row)| row.accounts.get(&key).copied().unwrap_or(0)).collect(),
    });
    PhaseReadings {
        name: phase,
        estimates: phase.estimates(),
        steps: rows.iter().map(|(step, _)| *step).collect(),
        in_use_bytes: rows.iter().map(|(_, row)| row.in_use).collect(),
        peak_bytes: rows.iter().map(|(_, row)| row.peak).collect(),
        reserved_bytes: rows.iter().map(|(_, row)| row.reserved).collect(),
        accounts: accounts.collect(),
    }
}

impl TimelineView {
    /// Thins a timeline.
    pub fn new(timeline: MemoryTimeline) -> Self {
        let mut report = TimelineReport::new(&timeline);
        if let Some(live) = &mut report.live {
            live.groups.truncate(MAX_LIVE_GROUPS);
        }
        let count = timeline.boundaries.len();
        let boundaries_each = count.div_ceil(MAX_BOUNDARIES).max(1);
        let kept = kept_points(&timeline, boundaries_each);
        let boundaries = timeline.boundaries.at(&kept);
        let mut accounts = timeline.accounts;
        for account in &mut accounts {
            account.bytes = kept.iter().map(|&at| account.bytes[at]).collect();
        }
        let mut plans = timeline.plans;
        for plan in &mut plans {
            plan.from = kept.partition_point(|&at| at < plan.from);
        }
        Self {
            unified: timeline.unified,
            boundaries_each,
            phases: timeline.phases,
            places: timeline.places,
            boundaries,
            accounts,
            plans,
            report,
        }
    }
}

/// The boundary with the most memory of every `each`.
fn kept_points(timeline: &MemoryTimeline, each: usize) -> Vec<usize> {
    let held = |at: usize| {
        let accounts = timeline.accounts.iter();
        let sum: u64 = accounts.map(|account| account.bytes[at]).sum();
        sum.max(timeline.boundaries.in_use_bytes[at].unwrap_or(0))
    };
    let count = timeline.boundaries.len();
    let windows = (0..count).step_by(each);
    let largest = windows.filter_map(|from| (from..count.min(from + each)).max_by_key(|&at| held(at)));
    largest.collect()
}
