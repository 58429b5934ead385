//! `memory.jsonl` and the memory timeline.

use super::lines::{self, Met};
use firebrick_engine::Result;
use firebrick_engine::metrics::timeline::{Boundaries, PlannedBytes, TimelinePhase};
use firebrick_engine::metrics::{MemoryTimeline, Phase, TimelineReport};
use firebrick_engine::plan::estimate::EstimatePhase;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Readings of a phase in a report; of more steps the largest of several that follow each other.
const READINGS: usize = 1000;

/// Boundaries in a report; of more the largest of several that follow each other.
const BOUNDARIES: usize = 3000;

/// Groups of live allocations in a report, the largest.
const LIVE_GROUPS: usize = 20;

/// What a run's phases held.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryReadings {
    /// Where the numbers come from, as `memory.jsonl` says.
    pub source: String,
    /// Steps that a reading is the largest of.
    pub steps_each: usize,
    /// By phase, in the order in which they first ran.
    pub phases: Vec<PhaseReadings>,
}

/// What a phase held, step by step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PhaseReadings {
    /// Its name.
    pub name: String,
    /// The phases of the estimate that predict its bytes: the largest of them does.
    pub estimates: &'static [EstimatePhase],
    /// The steps that it ran in.
    pub steps: Vec<u64>,
    /// Bytes in use at its end.
    pub in_use_bytes: Vec<u64>,
    /// Most bytes in use while it ran, where the source records it.
    pub peak_bytes: Vec<Option<u64>>,
    /// Bytes that the pools held at its end.
    pub reserved_bytes: Vec<u64>,
    /// What its accounts held at most, each at its own time.
    pub accounts: Vec<AccountSeries>,
}

/// An account of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AccountSeries {
    /// Category.
    pub category: String,
    /// `device` or `host`.
    pub home: String,
    /// Most bytes in each step.
    pub peak_bytes: Vec<u64>,
}

/// The timeline without its trace, and what stands out in it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineView {
    /// Whether host and device are one memory.
    pub unified: bool,
    /// Boundaries that a row is the largest of.
    pub boundaries_each: usize,
    /// Phases.
    pub phases: Vec<TimelinePhase>,
    /// Names of places.
    pub places: Vec<firebrick_engine::executor::BoundaryKind>,
    /// Boundaries.
    pub boundaries: Boundaries,
    /// Who held how much.
    pub accounts: Vec<firebrick_engine::metrics::timeline::AccountBytes>,
    /// Plans.
    pub plans: Vec<PlannedBytes>,
    /// What `firebrick memory` prints.
    pub report: TimelineReport,
}

#[derive(Deserialize)]
struct Reading {
    step: u64,
    phase: String,
    source: String,
    in_use_bytes: u64,
    reserved_bytes: u64,
    peak_bytes: Option<u64>,
    accounts: Vec<Account>,
}

#[derive(Deserialize)]
struct Account {
    category: String,
    home: String,
    peak_bytes: u64,
}

/// The largest of a phase's readings in some steps.
#[derive(Default)]
struct Largest {
    in_use: u64,
    peak: Option<u64>,
    reserved: u64,
    accounts: BTreeMap<(String, String), u64>,
}

/// A phase's readings by step.
#[derive(Default)]
struct ByStep(BTreeMap<u64, Largest>);

impl Largest {
    fn add(&mut self, reading: Reading) {
        self.in_use = self.in_use.max(reading.in_use_bytes);
        self.peak = self.peak.max(reading.peak_bytes);
        self.reserved = self.reserved.max(reading.reserved_bytes);
        for account in reading.accounts {
            let key = (account.category, account.home);
            let own = self.accounts.entry(key).or_default();
            *own = (*own).max(account.peak_bytes);
        }
    }

    fn merge(&mut self, other: Self) {
        self.in_use = self.in_use.max(other.in_use);
        self.peak = self.peak.max(other.peak);
        self.reserved = self.reserved.max(other.reserved);
        for (key, bytes) in other.accounts {
            let own = self.accounts.entry(key).or_default();
            *own = (*own).max(bytes);
        }
    }
}

/// Reads a run's `memory.jsonl`.
pub fn readings(path: &Path) -> Result<(Option<MemoryReadings>, Met)> {
    let mut phases: Vec<(String, ByStep)> = Vec::new();
    let mut source = String::new();
    let met = lines::read(path, |reading: Reading, _| {
        source.clone_from(&reading.source);
        let known = phases.iter().position(|(name, _)| *name == reading.phase);
        let at = known.unwrap_or_else(|| {
            phases.push((reading.phase.clone(), ByStep::default()));
            phases.len() - 1
        });
        phases[at].1.0.entry(reading.step).or_default().add(reading);
        true
    })?;
    let most = phases.iter().map(|(_, rows)| rows.0.len()).max();
    let Some(most) = most else {
        return Ok((None, met));
    };
    let steps_each = most.div_ceil(READINGS);
    let phases = phases.into_iter();
    let phases = phases.map(|(name, rows)| rows.series(name, steps_each));
    let readings = MemoryReadings { source, steps_each, phases: phases.collect() };
    Ok((Some(readings), met))
}

impl ByStep {
    fn series(self, name: String, steps_each: usize) -> PhaseReadings {
        let mut rows: Vec<(u64, Largest)> = Vec::new();
        for (at, (step, largest)) in self.0.into_iter().enumerate() {
            match rows.last_mut() {
                Some((_, last)) if at % steps_each != 0 => last.merge(largest),
                _ => rows.push((step, largest)),
            }
        }
        let keys: BTreeSet<(String, String)> = rows.iter().flat_map(|(_, row)| row.accounts.keys().cloned()).collect();
        let held = |key: &(String, String)| -> Vec<u64> {
            let own = rows.iter().map(|(_, row)| row.accounts.get(key));
            own.map(|bytes| bytes.copied().unwrap_or(0)).collect()
        };
        let accounts = keys.iter().map(|key| AccountSeries {
            category: key.0.clone(),
            home: key.1.clone(),
            peak_bytes: held(key),
        });
        PhaseReadings {
            accounts: accounts.collect(),
            estimates: Phase::ALL.iter().find(|phase| phase.name() == name).map_or(&[], |phase| phase.estimates()),
            name,
            steps: rows.iter().map(|(step, _)| *step).collect(),
            in_use_bytes: rows.iter().map(|(_, row)| row.in_use).collect(),
            peak_bytes: rows.iter().map(|(_, row)| row.peak).collect(),
            reserved_bytes: rows.iter().map(|(_, row)| row.reserved).collect(),
        }
    }
}

impl TimelineView {
    /// Thins a timeline.
    #[must_use]
    pub fn new(timeline: MemoryTimeline) -> Self {
        let mut report = TimelineReport::new(&timeline);
        if let Some(live) = &mut report.live {
            live.groups.truncate(LIVE_GROUPS);
        }
        let count = timeline.boundaries.len();
        let boundaries_each = count.div_ceil(BOUNDARIES).max(1);
        let kept = kept(&timeline, boundaries_each);
        let all = &timeline.boundaries;
        let boundaries = Boundaries {
            step: pick(&all.step, &kept),
            phase: pick(&all.phase, &kept),
            place: pick(&all.place, &kept),
            segment: pick(&all.segment, &kept),
            seconds: pick(&all.seconds, &kept),
            in_use_bytes: pick(&all.in_use_bytes, &kept),
            peak_bytes: pick(&all.peak_bytes, &kept),
            reserved_bytes: pick(&all.reserved_bytes, &kept),
        };
        let mut accounts = timeline.accounts;
        for account in &mut accounts {
            account.bytes = pick(&account.bytes, &kept);
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

/// Of every so many boundaries the one at which most was held.
fn kept(timeline: &MemoryTimeline, each: usize) -> Vec<usize> {
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

fn pick<T: Clone>(column: &[T], kept: &[usize]) -> Vec<T> {
    kept.iter().map(|&at| column[at].clone()).collect()
}
