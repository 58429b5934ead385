//! Held memory at the boundaries of a run: the latest in a ring, and every one of steps that are to be kept whole.
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

macro_rules! boundary_kinds {
    ($($(#[$doc:meta])+ $kind:ident = $name:literal,)+) => {
        /// Place in a phase at which a row was taken.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
        pub enum BoundaryKind {
            $($(#[$doc])+ #[serde(rename = $name)] $kind,)+
        }

        impl BoundaryKind {
            /// All places, in the order of a phase.
            pub const ALL: [Self; [$(Self::$kind),+].len()] = [$(Self::$kind),+];

            /// Its name in files and tables.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }
        }
    };
}

boundary_kinds! {
    /// The phase begins; models are where the phase before left them.
    Begin = "begin",
    /// A completion has ended.
    Sample = "sample",
    /// A segment has run forward.
    Forward = "forward",
    /// A micro-batch is at the head: before its rows are read in scoring, after its loss in training.
    Head = "head",
    /// The graph of a segment is there, for its backward pass.
    Graph = "graph",
    /// A segment has run backward.
    Backward = "backward",
    /// The embedding's gradient is there.
    Embedding = "embedding",
    /// A unit's weights are updated.
    Update = "update",
    /// Memory ran out; what the attempt held is gone already.
    OutOfMemory = "out_of_memory",
    /// The phase continues under another plan.
    Replanned = "replanned",
    /// The phase ends.
    End = "end",
}

/// A place in a run, with the segment or unit if the place is one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// The place.
    pub place: BoundaryKind,
    /// Index of the segment; of the decoder's unit at [`BoundaryKind::Update`].
    pub segment: Option<u32>,
}

impl Boundary {
    /// A place of a segment or a unit.
    pub fn at(place: BoundaryKind, segment: usize) -> Self {
        Self { place, segment: Some(segment as u32) }
    }
}

impl From<BoundaryKind> for Boundary {
    fn from(place: BoundaryKind) -> Self {
        Self { place, segment: None }
    }
}

/// Moment of a row or an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Training step; 0 before the first.
    pub step: u64,
    /// Name of the phase; empty before the first.
    pub phase: &'static str,
    /// Place in the phase.
    pub boundary: Boundary,
}

/// Held memory at a boundary.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BoundaryRow {
    /// When.
    pub moment: Moment,
    /// Seconds since the step began.
    pub seconds: f64,
    /// The device's memory, where it could be read without waiting for the device.
    pub reading: Option<Reading>,
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
    /// True if rows of the current step are kept whole.
    keeps: bool,
    accounts: Vec<Account>,
    /// Rows with the bytes of the accounts that had held something by then.
    rows: VecDeque<(BoundaryRow, Box<[u64]>)>,
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
                rows: VecDeque::new(),
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

    /// Most that the pools had at the readings since the phase began; `None` if no pool was read.
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
    pub fn taken(&self) -> u64 {
        self.inner().taken
    }

    /// The rows that are there.
    pub fn rows(&self) -> BoundaryRows {
        let inner = self.inner();
        let rows = inner.rows.iter().map(|(row, held)| {
            let mut held = held.to_vec();
            // accounts that came later held nothing
            held.resize(inner.accounts.len(), 0);
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

    /// The trace of allocations, if there is one.
    pub fn trace(&self) -> Option<Trace> {
        self.trace.as_ref()?.read()
    }

    /// The moment at a place of a trace; `None` before the first row.
    pub fn moment(&self, place: u64) -> Option<Moment> {
        self.inner().moment(place)
    }
}

impl Inner {
    fn push(&mut self, boundary: Boundary, reading: Option<Reading>, held: impl Iterator<Item = u64>) {
        self.make_room(1);
        let mut row_bytes = vec![0; self.accounts.len()];
        for (account, bytes) in Account::all().zip(held).filter(|(_, bytes)| *bytes > 0) {
            if let Some(column) = self.accounts.iter().position(|known| *known == account) {
                row_bytes[column] = bytes;
            } else {
                self.accounts.push(account);
                row_bytes.push(bytes);
            }
        }
        let moment = Moment { step: self.step, phase: self.phase, boundary };
        let row = BoundaryRow { moment, seconds: self.started.elapsed().as_secs_f64(), reading };
        self.rows.push_back((row, row_bytes.into_boxed_slice()));
        self.taken += 1;
    }

    /// Drops the oldest rows until there is room for `more`.
    fn make_room(&mut self, more: usize) {
        let most = if self.keeps { KEPT_ROWS } else { RING_ROWS };
        let shrinks = self.rows.len() > most;
        let excess = (self.rows.len() + more).saturating_sub(most);
        for (row, _) in self.rows.drain(..excess) {
            let step = row.moment.step;
            self.dropped = match self.dropped {
                (last, count) if last == step => (step, count + 1),
                _ => (step, 1),
            };
        }
        if shrinks {
            self.rows.shrink_to(RING_ROWS);
        }
    }

    /// A boundary as a trace keeps it: the step, then 8 bits of the phase, 8 of the place and 16 of the segment, each
    /// plus one.
    fn code(&mut self, boundary: Boundary) -> u64 {
        let phase = self.phases.iter().position(|&name| name == self.phase).unwrap_or_else(|| {
            self.phases.push(self.phase);
            self.phases.len() - 1
        });
        let segment = boundary.segment.map_or(0, |segment| (segment + 1).min(0xffff));
        (self.step << 32) | ((phase as u64 + 1) << 24) | ((boundary.place as u64 + 1) << 16) | u64::from(segment)
    }

    fn moment(&self, code: u64) -> Option<Moment> {
        let [phase, place, segment] = [(code >> 24) & 0xff, (code >> 16) & 0xff, code & 0xffff];
        let index = |field: u64| field.checked_sub(1).map(|index| index as usize);
        let place = *BoundaryKind::ALL.get(index(place)?)?;
        let segment = index(segment).map(|segment| segment as u32);
        Some(Moment { step: code >> 32, phase: self.phases.get(index(phase)?)?, boundary: Boundary { place, segment } })
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
        let moments = accounts.for_model(Role::Critic).hold(Category::Moments, Home::Host, 7);
        drop(weights);
        log.record(BoundaryKind::End, None);
        drop(moments);
        log.record(BoundaryKind::End, None);

        let rows = log.rows();
        let expected = [
            account(Category::Parameters, Home::Device, Role::Policy),
            account(Category::Moments, Home::Host, Role::Critic),
        ];
        assert_eq!(rows.accounts, expected);
        let held: Vec<&[u64]> = rows.rows.iter().map(|(_, held)| &held[..]).collect();
        assert_eq!(held, [[0, 0], [10, 0], [0, 7], [0, 0]]);
        let moment = rows.rows[1].0.moment;
        assert_eq!((moment.step, moment.phase), (1, "gen"));
        assert_eq!(moment.boundary, Boundary::at(BoundaryKind::Forward, 3));
        assert_eq!((rows.first, rows.dropped, log.taken()), (0, 0, 4));
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
