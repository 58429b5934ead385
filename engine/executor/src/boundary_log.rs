//! What is held at the boundaries of a run: the latest in a ring, and every one of steps that are to be kept whole.
//!
//! A boundary costs a reading of the device's memory (`Runtime`) and a row of a few hundred bytes. So the latest are
//! always there, for the report of a run that ends out of memory.

use super::pool_peak::{PoolPeak, RunningPeak};
use firebrick_backends::accounts::{Account, Accounts};
use firebrick_backends::allocation_trace::{AllocationTrace, Trace};
use firebrick_backends::memory::Reading;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Rows of the ring.
pub const RING_ROWS: usize = 2048;

/// Most rows of steps that are kept whole.
pub const KEPT_ROWS: usize = 1 << 18;

/// Where in a phase a row was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BoundaryKind {
    /// The phase begins; models are where the phase before left them.
    Begin,
    /// A completion has ended.
    Sample,
    /// A segment has run forward.
    Forward,
    /// A micro-batch is at the head: before its rows are read in scoring, after its loss in training.
    Head,
    /// The graph of a segment is there, for its backward pass.
    Graph,
    /// A segment has run backward.
    Backward,
    /// The embedding's gradient is there.
    Embedding,
    /// A unit's weights are updated.
    Update,
    /// Memory ran out; what the attempt held is gone already.
    OutOfMemory,
    /// The phase continues under another plan.
    Replanned,
    /// The phase ends.
    End,
}

impl BoundaryKind {
    /// All places, in the order of a phase.
    pub const ALL: [Self; 11] = [
        Self::Begin,
        Self::Sample,
        Self::Forward,
        Self::Head,
        Self::Graph,
        Self::Backward,
        Self::Embedding,
        Self::Update,
        Self::OutOfMemory,
        Self::Replanned,
        Self::End,
    ];

    /// Its name in files and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Sample => "sample",
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Graph => "graph",
            Self::Backward => "backward",
            Self::Embedding => "embedding",
            Self::Update => "update",
            Self::OutOfMemory => "out_of_memory",
            Self::Replanned => "replanned",
            Self::End => "end",
        }
    }
}

/// Where a run stands: a place, and the segment or the unit where the place is one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// The place.
    pub place: BoundaryKind,
    /// Index of the segment; of the decoder's unit at [`BoundaryKind::Update`].
    pub segment: Option<u32>,
}

impl Boundary {
    /// A place of a segment or a unit.
    #[must_use]
    pub fn at(place: BoundaryKind, segment: usize) -> Self {
        Self { place, segment: Some(segment as u32) }
    }
}

impl From<BoundaryKind> for Boundary {
    fn from(place: BoundaryKind) -> Self {
        Self { place, segment: None }
    }
}

/// What the run was doing when a row was taken, or an allocation made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Training step; 0 before the first.
    pub step: u64,
    /// Name of the phase; empty before the first.
    pub phase: &'static str,
    /// Where in the phase.
    pub boundary: Boundary,
}

/// What is held at a boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BoundaryRow {
    /// When.
    pub moment: Moment,
    /// Seconds since the step began.
    pub seconds: f64,
    /// The device's memory, where it could be read without waiting for the device.
    pub reading: Option<Reading>,
    /// How many accounts had held something by then.
    accounts: u32,
}

/// Rows as they were taken, oldest first.
#[derive(Clone, Debug, Default)]
pub struct BoundaryRows {
    /// Accounts that held something at any time, in the order in which they first did.
    pub accounts: Vec<Account>,
    /// Rows, and what each account held: one number for each account.
    pub rows: Vec<(BoundaryRow, Vec<u64>)>,
    /// The number of the first row among all rows of the run.
    pub first: u64,
    /// Rows at the beginning of the first row's step that are no longer there.
    pub dropped: u64,
}

/// Takes a row at every boundary. Shared by everything that runs for one run.
#[derive(Debug)]
pub struct BoundaryLog {
    accounts: Arc<Accounts>,
    trace: Option<AllocationTrace>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    step: u64,
    phase: &'static str,
    started: Instant,
    /// Whether rows of the current step are kept whole.
    keeps: bool,
    accounts: Vec<Account>,
    /// Place of each account in `accounts`, by [`Account::index`].
    columns: [Option<u8>; Account::COUNT],
    rows: VecDeque<BoundaryRow>,
    /// Bytes by account, one row after the other.
    bytes: VecDeque<u64>,
    /// Rows that were taken in all.
    taken: u64,
    /// The step whose rows were dropped last, and how many of them.
    dropped: (u64, u64),
    /// Phases that the places of a trace name by their index.
    phases: Vec<&'static str>,
    /// Most that the pools had since the phase began.
    peak: RunningPeak,
}

impl BoundaryLog {
    /// A log of what these accounts hold; with a trace of allocations, whose places it sets.
    #[must_use]
    pub fn new(accounts: &Arc<Accounts>, trace: Option<AllocationTrace>) -> Arc<Self> {
        Arc::new(Self {
            accounts: Arc::clone(accounts),
            trace,
            inner: Mutex::new(Inner {
                step: 0,
                phase: "",
                started: Instant::now(),
                keeps: false,
                accounts: Vec::new(),
                columns: [None; Account::COUNT],
                rows: VecDeque::new(),
                bytes: VecDeque::new(),
                taken: 0,
                dropped: (0, 0),
                phases: Vec::new(),
                peak: RunningPeak::default(),
            }),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step begins. All of its rows are kept where `keep`, up to [`KEPT_ROWS`]; else the latest [`RING_ROWS`] of all
    /// steps.
    pub fn begin_step(&self, step: u64, keep: bool) {
        let mut inner = self.inner();
        inner.step = step;
        inner.started = Instant::now();
        inner.keeps = keep;
        inner.make_room(0);
    }

    /// A phase begins: a row. The peak of the pools is counted from here.
    pub fn begin_phase(&self, step: u64, phase: &'static str, reading: Option<Reading>) {
        {
            let mut inner = self.inner();
            inner.step = step;
            inner.phase = phase;
            inner.peak.reset();
        }
        self.record(BoundaryKind::Begin, reading);
    }

    /// The work of the phase begins again, under another plan: a row. The peak of the pools is counted from here.
    pub fn restart_phase(&self, reading: Option<Reading>) {
        self.inner().peak.reset();
        self.record(BoundaryKind::Replanned, reading);
    }

    /// Takes a reading between two boundaries into the peak of the pools, and gives it with that peak; no row.
    pub fn raise_peak(&self, reading: Reading) -> Reading {
        self.inner().peak.raise(reading)
    }

    /// Most that the pools had at the readings since the phase began; `None` where no pool was read.
    #[must_use]
    pub fn pool_peak(&self) -> Option<PoolPeak> {
        self.inner().peak.get()
    }

    /// Takes a row, and gives the reading with the peak of the pools.
    pub fn record(&self, boundary: impl Into<Boundary>, reading: Option<Reading>) -> Option<Reading> {
        let boundary = boundary.into();
        let mut inner = self.inner();
        let reading = reading.map(|reading| inner.peak.raise(reading));
        inner.push(boundary, reading, self.accounts.held());
        if let Some(trace) = &self.trace {
            trace.set_place(inner.code(boundary));
        }
        reading
    }

    /// Rows that were taken so far, those that are no longer there among them.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.inner().taken
    }

    /// The rows that are there.
    #[must_use]
    pub fn rows(&self) -> BoundaryRows {
        let inner = self.inner();
        let mut bytes = inner.bytes.iter().copied();
        let width = inner.accounts.len();
        let rows = inner.rows.iter().map(|row| {
            let mut held: Vec<u64> = bytes.by_ref().take(row.accounts as usize).collect();
            // accounts that came later held nothing
            held.resize(width, 0);
            (*row, held)
        });
        let rows: Vec<_> = rows.collect();
        let (step, dropped) = inner.dropped;
        let is_cut = rows.first().is_some_and(|(row, _)| row.moment.step == step);
        BoundaryRows {
            accounts: inner.accounts.clone(),
            first: inner.taken - rows.len() as u64,
            rows,
            dropped: if is_cut { dropped } else { 0 },
        }
    }

    /// The trace of allocations, where there is one.
    #[must_use]
    pub fn trace(&self) -> Option<Trace> {
        self.trace.as_ref()?.read()
    }

    /// What the run was doing at a place of a trace; none before the first row.
    #[must_use]
    pub fn moment(&self, place: u64) -> Option<Moment> {
        self.inner().moment(place)
    }
}

/// Bits of a trace's place: the step, then the phase, the place and the segment; all but the step plus one.
const PHASE_BITS: u32 = 8;
const PLACE_BITS: u32 = 8;
const SEGMENT_BITS: u32 = 16;

impl Inner {
    fn push(&mut self, boundary: Boundary, reading: Option<Reading>, held: impl Iterator<Item = u64>) {
        self.make_room(1);
        let start = self.bytes.len();
        self.bytes.resize(start + self.accounts.len(), 0);
        for (index, bytes) in held.enumerate().filter(|(_, bytes)| *bytes > 0) {
            if let Some(column) = self.columns[index] {
                self.bytes[start + usize::from(column)] = bytes;
            } else {
                self.columns[index] = Some(self.accounts.len() as u8);
                self.accounts.extend(Account::all().nth(index));
                self.bytes.push_back(bytes);
            }
        }
        self.rows.push_back(BoundaryRow {
            moment: Moment { step: self.step, phase: self.phase, boundary },
            seconds: self.started.elapsed().as_secs_f64(),
            reading,
            accounts: self.accounts.len() as u32,
        });
        self.taken += 1;
    }

    /// Drops the oldest rows until there is room for `more`.
    fn make_room(&mut self, more: usize) {
        let most = if self.keeps { KEPT_ROWS } else { RING_ROWS };
        if self.rows.len() + more <= most {
            return;
        }
        let shrinks = self.rows.len() > most;
        while self.rows.len() + more > most {
            let Some(row) = self.rows.pop_front() else {
                break;
            };
            self.bytes.drain(..row.accounts as usize);
            let step = row.moment.step;
            self.dropped = match self.dropped {
                (last, count) if last == step => (step, count + 1),
                _ => (step, 1),
            };
        }
        if shrinks {
            self.rows.shrink_to(RING_ROWS);
            self.bytes.shrink_to(RING_ROWS * self.accounts.len());
        }
    }

    /// A boundary as a trace keeps it.
    fn code(&mut self, boundary: Boundary) -> u64 {
        let known = self.phases.iter().position(|&name| name == self.phase);
        let phase = known.unwrap_or_else(|| {
            self.phases.push(self.phase);
            self.phases.len() - 1
        });
        let most = (1 << SEGMENT_BITS) - 1;
        let segment = boundary.segment.map_or(0, |s| (s + 1).min(most));
        let code = (self.step << PHASE_BITS) | (phase as u64 + 1);
        let code = (code << PLACE_BITS) | (boundary.place as u64 + 1);
        (code << SEGMENT_BITS) | u64::from(segment)
    }

    fn moment(&self, code: u64) -> Option<Moment> {
        let below = |bits: u32| (1 << bits) - 1;
        let segment = (code & below(SEGMENT_BITS)) as u32;
        let code = code >> SEGMENT_BITS;
        let place = (code & below(PLACE_BITS)) as usize;
        let code = code >> PLACE_BITS;
        let phase = (code & below(PHASE_BITS)) as usize;
        Some(Moment {
            step: code >> PHASE_BITS,
            phase: self.phases.get(phase.checked_sub(1)?)?,
            boundary: Boundary {
                place: *BoundaryKind::ALL.get(place.checked_sub(1)?)?,
                segment: segment.checked_sub(1),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::accounts::{Category, Home, Role};

    fn account(category: Category, home: Home, model: Role) -> Account {
        Account { category, home, model }
    }

    #[test]
    fn rows_have_what_every_account_holds_at_the_time() {
        let accounts = Accounts::new();
        let log = BoundaryLog::new(&accounts, None);
        log.begin_step(1, true);
        log.begin_phase(1, "gen", None);
        let weights = accounts.hold(Category::Parameters, Home::Device, 10);
        log.record(Boundary::at(BoundaryKind::Forward, 3), None);
        let critic = accounts.for_model(Role::Critic);
        let moments = critic.hold(Category::Moments, Home::Host, 7);
        drop(weights);
        log.record(BoundaryKind::End, None);
        drop(moments);
        log.record(BoundaryKind::End, None);

        let found = log.rows();
        let expected = [
            account(Category::Parameters, Home::Device, Role::Policy),
            account(Category::Moments, Home::Host, Role::Critic),
        ];
        assert_eq!(found.accounts, expected);
        let held: Vec<&[u64]> = found.rows.iter().map(|(_, held)| &held[..]).collect();
        assert_eq!(held, [[0, 0], [10, 0], [0, 7], [0, 0]]);
        let moment = found.rows[1].0.moment;
        assert_eq!((moment.step, moment.phase), (1, "gen"));
        assert_eq!(moment.boundary, Boundary::at(BoundaryKind::Forward, 3));
        assert_eq!((found.first, found.dropped, log.taken()), (0, 0, 4));
    }

    #[test]
    fn the_ring_has_the_latest_rows_and_kept_steps_all_of_theirs() {
        let accounts = Accounts::new();
        let log = BoundaryLog::new(&accounts, None);
        let more = RING_ROWS + 100;
        let _held = accounts.hold(Category::Gradients, Home::Device, 5);
        log.begin_step(1, true);
        for segment in 0..more {
            log.record(Boundary::at(BoundaryKind::Forward, segment), None);
        }
        assert_eq!(log.rows().rows.len(), more);
        log.begin_step(2, false);
        let ring = log.rows();
        assert_eq!((ring.rows.len(), ring.first, ring.dropped), (RING_ROWS, 100, 100));
        let _more = accounts.hold(Category::Moments, Home::Device, 6);
        for segment in 0..more {
            log.record(Boundary::at(BoundaryKind::Backward, segment), None);
        }
        let ring = log.rows();
        assert_eq!((ring.rows.len(), ring.dropped), (RING_ROWS, 100));
        for (i, (row, held)) in ring.rows.iter().enumerate() {
            assert_eq!(row.moment.boundary.segment, Some(i as u32 + 100));
            assert_eq!((row.moment.step, &held[..]), (2, &[5, 6][..]));
        }
    }

    #[test]
    fn a_place_of_a_trace_is_the_moment_that_it_was_made_of() {
        let log = BoundaryLog::new(&Accounts::new(), None);
        assert_eq!(log.moment(0), None);
        let mut inner = log.inner();
        for (step, phase) in [(0, "testing"), (1, "gen"), (1 << 30, "testing")] {
            (inner.step, inner.phase) = (step, phase);
            for boundary in [BoundaryKind::Begin.into(), Boundary::at(BoundaryKind::End, 65_534)] {
                let code = inner.code(boundary);
                let moment = Moment { step, phase, boundary };
                assert_eq!(inner.moment(code), Some(moment));
            }
        }
    }

    #[test]
    fn places_are_at_their_own_index() {
        for (i, place) in BoundaryKind::ALL.into_iter().enumerate() {
            assert_eq!(place as usize, i);
            assert_eq!(serde_json::to_value(place).unwrap(), place.name());
        }
    }
}
