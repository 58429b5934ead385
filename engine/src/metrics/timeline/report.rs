//! Summary of a timeline: the peak, its accounts and prediction, and changes since the step before.

use super::format::{MemoryTimeline, PlannedBytes, Reason};
use super::live::LiveAllocations;
use crate::executor::BoundaryKind;
use crate::plan::estimate::PhaseEstimate;
use firebrick_backends::accounts::{Account, Category, Home};
use serde::Serialize;

/// A moment of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct When {
    /// Training step; 0 before the first.
    pub step: u64,
    /// The phase.
    pub phase: String,
    /// Place in the phase.
    pub place: BoundaryKind,
    /// The segment; the decoder's unit at [`BoundaryKind::Update`].
    pub segment: Option<u32>,
    /// Seconds since the step began.
    pub seconds: f64,
}

/// Bytes of an account at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Holder {
    /// Account.
    #[serde(flatten)]
    pub account: Account,
    /// Bytes.
    pub bytes: u64,
    /// Share of the peak; `None` of host bytes.
    pub share: Option<f64>,
}

/// Device bytes of a category at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CategoryBytes {
    /// The category.
    pub category: Category,
    /// Bytes at the peak.
    pub bytes: u64,
    /// Prediction of the plan for the peak of the phase.
    pub predicted_bytes: Option<u64>,
    /// Bytes at the largest boundary of the same phase in the step before, if the timeline has it.
    pub before_bytes: Option<u64>,
}

/// The boundary with the most bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PeakReport {
    /// Moment of the peak.
    pub when: When,
    /// Device bytes in use, or the sum of the accounts if they were not read at every boundary.
    pub bytes: u64,
    /// Peak bytes in use of the phase until then, also between boundaries, if the source records it.
    pub peak_bytes: Option<u64>,
    /// Prediction of the plan for the phase.
    pub predicted_bytes: Option<u64>,
    /// Predicted activity at the peak of the phase.
    pub predicted_moment: Option<String>,
    /// Accounts with bytes, the largest first.
    pub holders: Vec<Holder>,
    /// Bytes in use and in no account: temporaries and the program.
    pub unaccounted_bytes: Option<u64>,
    /// Boundary of [`CategoryBytes::before_bytes`].
    pub before: Option<When>,
    /// Bytes by category, in the order of [`Category::ALL`].
    pub categories: Vec<CategoryBytes>,
}

/// The largest boundary of a phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhasePeak {
    /// Moment of the boundary.
    pub when: When,
    /// Device bytes, as in [`PeakReport::bytes`].
    pub bytes: u64,
    /// Peak bytes in use of the phase, if the source records it.
    pub peak_bytes: Option<u64>,
    /// The largest prediction of the phase.
    pub predicted_bytes: Option<u64>,
}

/// Summary of a timeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelineReport {
    /// Reason for writing the timeline.
    pub reason: Reason,
    /// The error that ended the run.
    pub error: Option<String>,
    /// The device.
    pub device: String,
    /// Steps of its boundaries.
    pub steps: Vec<u64>,
    /// Number of boundaries.
    pub boundaries: usize,
    /// Missing boundaries at the beginning of the first step.
    pub dropped: u64,
    /// The largest boundary, if there is one.
    pub peak: Option<PeakReport>,
    /// The largest boundary of every phase, in the order of their first runs.
    pub phases: Vec<PhasePeak>,
    /// Live allocations at their peak, if they were traced.
    pub live: Option<LiveAllocations>,
}

impl TimelineReport {
    /// The report of a timeline.
    pub fn new(timeline: &MemoryTimeline) -> Self {
        let rows = Rows::new(timeline);
        let mut order: Vec<usize> = Vec::new();
        for &phase in &timeline.boundaries.phase {
            if !order.contains(&phase) {
                order.push(phase);
            }
        }
        Self {
            reason: timeline.reason,
            error: timeline.error.clone(),
            device: timeline.device.clone(),
            steps: timeline.steps(),
            boundaries: timeline.boundaries.len(),
            dropped: timeline.dropped,
            peak: rows.largest(|_| true).map(|row| rows.peak(row)),
            phases: order.into_iter().filter_map(|phase| rows.phase(phase)).collect(),
            live: LiveAllocations::new(timeline),
        }
    }
}

/// The rows of a timeline.
struct Rows<'t> {
    timeline: &'t MemoryTimeline,
    /// True if memory was read at every boundary.
    is_read: bool,
}

impl<'t> Rows<'t> {
    fn new(timeline: &'t MemoryTimeline) -> Self {
        let readings = &timeline.boundaries.in_use_bytes;
        Self { timeline, is_read: readings.iter().all(Option::is_some) }
    }

    /// Returns true if bytes in a home are bytes of the device.
    fn on_device(&self, home: Home) -> bool {
        self.timeline.unified || home == Home::Device
    }

    /// Device bytes of the accounts that satisfy a predicate.
    fn account_bytes(&self, row: usize, predicate: impl Fn(&Account) -> bool) -> u64 {
        let accounts = self.timeline.accounts.iter();
        let selected = accounts.filter(|a| self.on_device(a.account.home) && predicate(&a.account));
        selected.map(|a| a.bytes[row]).sum()
    }

    fn accounted(&self, row: usize) -> u64 {
        self.account_bytes(row, |_| true)
    }

    fn category(&self, row: usize, category: Category) -> u64 {
        self.account_bytes(row, |account| account.category == category)
    }

    fn in_use(&self, row: usize) -> Option<u64> {
        self.timeline.boundaries.in_use_bytes[row].filter(|_| self.is_read)
    }

    fn bytes(&self, row: usize) -> u64 {
        self.in_use(row).unwrap_or_else(|| self.accounted(row))
    }

    /// The first of the largest rows that satisfy a predicate.
    fn largest(&self, predicate: impl Fn(usize) -> bool) -> Option<usize> {
        let rows = (0..self.timeline.boundaries.len()).filter(|&row| predicate(row));
        rows.rev().max_by_key(|&row| self.bytes(row))
    }

    fn when(&self, row: usize) -> When {
        let b = &self.timeline.boundaries;
        When {
            step: b.step[row],
            phase: self.timeline.phases[b.phase[row]].name.clone(),
            place: self.timeline.places[b.place[row]],
            segment: b.segment[row],
            seconds: b.seconds[row],
        }
    }

    fn plan(&self, row: usize) -> Option<&PlannedBytes> {
        let plans = self.timeline.plans.iter();
        plans.rev().find(|plan| plan.from <= row)
    }

    /// Estimates of the phase of a row, under its plan.
    fn estimates(&self, row: usize) -> Vec<&PhaseEstimate> {
        let names = &self.timeline.phases[self.timeline.boundaries.phase[row]].estimates;
        let estimates = self.plan(row).into_iter().flat_map(|plan| &plan.phases);
        estimates.filter(|estimate| names.contains(&estimate.name)).collect()
    }

    /// The estimate of a phase at a row: of an update's second half, that of the optimizer.
    fn estimate(&self, row: usize) -> Option<&PhaseEstimate> {
        let updates = self.when(row).place == BoundaryKind::Update;
        let estimates = self.estimates(row);
        estimates.iter().find(|e| e.name.is_update() == updates).or(estimates.first()).copied()
    }

    /// The largest row of the same phase in the newest earlier step that has it.
    fn before(&self, row: usize) -> Option<usize> {
        let b = &self.timeline.boundaries;
        let same = |&other: &usize| b.phase[other] == b.phase[row];
        let step = (0..row).filter(same).map(|other| b.step[other]);
        let step = step.filter(|&step| step < b.step[row]).max()?;
        self.largest(|other| same(&other) && b.step[other] == step)
    }

    fn peak(&self, row: usize) -> PeakReport {
        let bytes = self.bytes(row);
        let estimate = self.estimate(row);
        let holders = self.timeline.accounts.iter().map(|a| Holder {
            account: a.account,
            bytes: a.bytes[row],
            share: self.on_device(a.account.home).then(|| a.bytes[row] as f64 / bytes.max(1) as f64),
        });
        let mut holders: Vec<Holder> = holders.filter(|holder| holder.bytes > 0).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.bytes));
        let before = self.before(row);
        let categories = Category::ALL.into_iter().map(|category| CategoryBytes {
            category,
            bytes: self.category(row, category),
            predicted_bytes: estimate.map(|e| e.categories.get(&category).copied().unwrap_or(0)),
            before_bytes: before.map(|before| self.category(before, category)),
        });
        let holds = |c: &CategoryBytes| {
            let others = [c.predicted_bytes, c.before_bytes];
            c.bytes > 0 || others.into_iter().flatten().any(|bytes| bytes > 0)
        };
        PeakReport {
            when: self.when(row),
            bytes,
            peak_bytes: self.timeline.boundaries.peak_bytes[row],
            predicted_bytes: estimate.map(|e| e.total_bytes),
            predicted_moment: estimate.map(|e| e.moment.clone()),
            holders,
            unaccounted_bytes: self.in_use(row).map(|in_use| in_use.saturating_sub(self.accounted(row))),
            before: before.map(|before| self.when(before)),
            categories: categories.filter(holds).collect(),
        }
    }

    fn phase(&self, phase: usize) -> Option<PhasePeak> {
        let b = &self.timeline.boundaries;
        let row = self.largest(|row| b.phase[row] == phase)?;
        let rows = (0..b.len()).filter(|&row| b.phase[row] == phase);
        let estimates = rows.clone().flat_map(|row| self.estimates(row));
        Some(PhasePeak {
            when: self.when(row),
            bytes: self.bytes(row),
            peak_bytes: rows.filter_map(|row| b.peak_bytes[row]).max(),
            predicted_bytes: estimates.map(|e| e.total_bytes).max(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::two_steps;
    use super::*;
    use firebrick_backends::accounts::Role;

    #[test]
    fn the_peak_is_told_with_its_holders_its_prediction_and_the_step_before() {
        let report = TimelineReport::new(&two_steps());
        assert_eq!((report.boundaries, &report.steps[..]), (7, &[1, 2][..]));
        let peak = report.peak.expect("there are boundaries");
        let when = &peak.when;
        assert_eq!((when.step, when.place, when.segment), (2, BoundaryKind::Graph, Some(0)));
        assert_eq!((peak.bytes, peak.peak_bytes), (240, Some(250)));
        assert_eq!(peak.predicted_bytes, Some(200));
        let holders: Vec<_> =
            peak.holders.iter().map(|h| (h.account.category, h.account.model, h.bytes, h.share)).collect();
        let expected = [
            (Category::LiveGraph, Role::Policy, 90, Some(90.0 / 240.0)),
            (Category::Parameters, Role::Policy, 80, Some(80.0 / 240.0)),
            (Category::Moments, Role::Critic, 40, Some(40.0 / 240.0)),
        ];
        assert_eq!(holders, expected);
        assert_eq!(peak.unaccounted_bytes, Some(30));
        let before = peak.before.expect("step 1 has the phase");
        assert_eq!((before.step, before.place), (1, BoundaryKind::Forward));
        let categories: Vec<_> =
            peak.categories.iter().map(|c| (c.category, c.bytes, c.predicted_bytes, c.before_bytes)).collect();
        let expected = [
            (Category::Parameters, 80, Some(80), Some(80)),
            (Category::Moments, 40, Some(0), Some(0)),
            (Category::LiveGraph, 90, Some(100), Some(60)),
            (Category::Buffers, 0, Some(20), Some(0)),
        ];
        assert_eq!(categories, expected);
        let [phase] = &report.phases[..] else { panic!("{:?}", report.phases) };
        assert_eq!((phase.bytes, phase.peak_bytes), (240, Some(250)));
        assert_eq!(phase.predicted_bytes, Some(200));
    }

    #[test]
    fn the_optimizer_is_compared_with_its_own_estimate_and_each_row_with_its_own_plan() {
        let mut timeline = two_steps();
        timeline.boundaries.in_use_bytes[5] = Some(500);
        let mut later = timeline.plans[0].clone();
        (later.from, later.phases[1].total_bytes) = (5, 77);
        timeline.plans.push(later);
        let peak = TimelineReport::new(&timeline).peak.expect("a peak");
        assert_eq!((peak.when.place, peak.predicted_bytes), (BoundaryKind::Update, Some(77)));
    }

    #[test]
    fn without_readings_the_accounts_on_the_device_are_compared() {
        let mut timeline = two_steps();
        timeline.unified = false;
        timeline.boundaries.in_use_bytes[6] = None;
        let report = TimelineReport::new(&timeline);
        let peak = report.peak.expect("a peak");
        assert_eq!((peak.bytes, peak.unaccounted_bytes), (170, None));
        let moments = peak.holders.iter().find(|h| h.account.home == Home::Host);
        assert_eq!(moments.map(|h| (h.bytes, h.share)), Some((40, None)));
        let mut empty = two_steps();
        empty.boundaries = super::super::format::Boundaries::default();
        for account in &mut empty.accounts {
            account.bytes.clear();
        }
        let report = TimelineReport::new(&empty);
        assert!(report.peak.is_none() && report.phases.is_empty());
    }
}
