//! Watchdog: a thread that tells when a run has made no progress for too long, and what it waits for.
//!
//! Progress is a beat ([`heartbeat`]) or another phase. Time is counted in ticks of the watchdog's thread, each of which
//! counts little: while the process is stopped or the machine is suspended, no time passes.

mod hang;
mod threads;

pub use hang::Hang;

use crate::config::RunConfig;
use firebrick_backends::collective::Collective;
use firebrick_backends::heartbeat::{self, Pulse};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Multiple of a phase's longest pause so far that is no hang.
const PATIENCE: u32 = 10;
/// Further patience with another rank, whose watchdog knows the cause.
const PATIENCE_WITH_RANKS: f64 = 1.25;
/// Longest interval between two looks.
const LONGEST_INTERVAL: Duration = Duration::from_secs(1);
/// Looks within the shortest limit.
const LOOKS: u32 = 8;
/// Time for the report to be written, and for other ranks to be told: both may block too.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time in which the transport hands over a message to other ranks.
const HAND_OVER: Duration = Duration::from_millis(300);

/// Receives a hang, on the watchdog's thread. It usually ends the process.
pub(super) type HangHandler = Box<dyn Fn(&Hang) + Send + Sync>;

/// Part of a run: its step and the name of its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub step: u64,
    pub phase: &'static str,
}

/// The part before the first step: reading data, loading models.
pub(super) const LOAD: &str = "load";
/// Parts of a step between phases: files of the run folder, observer, trackers.
pub(super) const REPORT: &str = "report";

/// Watches one run, until it is dropped.
#[derive(Debug)]
pub(super) struct Watchdog {
    watched: Arc<Watched>,
    /// Stops the thread by its end.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Progress of the training thread.
#[derive(Debug, Default)]
struct Watched {
    pulse: Pulse,
    /// `None` while the caller of the trainer has control.
    place: Mutex<Option<Place>>,
}

/// A part of the run, until it is dropped.
#[derive(Debug)]
#[must_use = "the part ends when it is dropped"]
pub(super) struct Entered {
    watched: Arc<Watched>,
    before: Option<Place>,
}

impl Watchdog {
    /// Starts to watch this thread, if `trainer.heartbeat_timeout` is set.
    pub fn start(config: &RunConfig, ranks: &Arc<dyn Collective>, handler: Option<HangHandler>) -> Self {
        let watched = Arc::new(Watched::default());
        let timeout = config.trainer.heartbeat_timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let Some(timeout) = timeout else { return Self { watched, stop: None, thread: None } };
        let (stop, stopped) = channel();
        let watcher = Watcher {
            watched: Arc::clone(&watched),
            timeout,
            folder: std::path::absolute(&config.output).unwrap_or_else(|_| config.output.clone()),
            ranks: Arc::clone(ranks),
            handler,
        };
        let thread = std::thread::Builder::new().name("watchdog".into()).spawn(move || watcher.watch(&stopped));
        if let Err(error) = &thread {
            tracing::warn!("a hang of this run will not be noticed: the watchdog's thread cannot be started: {error}");
        }
        Self { watched, stop: Some(stop), thread: thread.ok() }
    }

    /// Enters a part of the run on this thread.
    pub fn enter(&self, step: u64, phase: &'static str) -> Entered {
        self.watched.pulse.follow_this_thread();
        heartbeat::beat();
        let before = self.watched.place().replace(Place { step, phase });
        Entered { watched: Arc::clone(&self.watched), before }
    }
}

impl Drop for Watchdog {
    /// Waits for the thread, which holds the ranks: their transport ends with its last owner.
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // a panic of it concerns no run
            let _ = thread.join();
        }
    }
}

impl Watched {
    fn place(&self) -> MutexGuard<'_, Option<Place>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        *self.watched.place() = self.before;
    }
}

/// The thread of a watchdog.
struct Watcher {
    watched: Arc<Watched>,
    timeout: Duration,
    folder: PathBuf,
    ranks: Arc<dyn Collective>,
    handler: Option<HangHandler>,
}

impl Watcher {
    fn watch(&self, stopped: &Receiver<()>) {
        let interval = (self.timeout / LOOKS).min(LONGEST_INTERVAL);
        let (mut pauses, mut last) = (Pauses::new(self.timeout), Instant::now());
        while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(interval) {
            let passed = last.elapsed().min(2 * interval);
            last = Instant::now();
            let place = *self.watched.place();
            if let Some(pause) = pauses.tick(place, self.watched.pulse.beats(), passed, || self.awaits_rank()) {
                self.report(&pause);
            }
        }
    }

    /// Returns true if the training thread waits for another rank.
    fn awaits_rank(&self) -> bool {
        heartbeat::waits().iter().any(|waiting| self.watched.pulse.follows(waiting) && waiting.rank.is_some())
    }

    /// Writes the report, tells other ranks, then the handler. Each step may block, so none is waited for for long.
    fn report(&self, pause: &Pause) {
        let hang = Hang::new(pause, &self.watched.pulse, self.ranks.rank(), self.ranks.size());
        let (report, folder) = (hang.clone(), self.folder.clone());
        let hang = within(REPORT_TIMEOUT, move || report.written(&folder)).unwrap_or(hang);
        if self.ranks.size() > 1 {
            let (ranks, message) = (Arc::clone(&self.ranks), hang.last_words());
            within(REPORT_TIMEOUT, move || ranks.abort(&message));
            std::thread::sleep(HAND_OVER);
        }
        match &self.handler {
            Some(handler) => handler(&hang),
            None => tracing::error!("{hang}"),
        }
    }
}

/// Runs work that may block: its result, if it ends in time.
fn within<T: Send + 'static>(time: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, result) = channel();
    // without a thread there is no result
    let _ = std::thread::Builder::new().spawn(move || done.send(work()));
    result.recv_timeout(time).ok()
}

/// A pause that is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause {
    place: Place,
    length: Duration,
    limit: Duration,
}

/// Times without progress.
struct Pauses {
    timeout: Duration,
    /// The last progress, and the time since.
    last: Option<(Place, u64)>,
    length: Duration,
    /// Longest pauses by phase.
    longest: BTreeMap<&'static str, Duration>,
    reported: bool,
}

impl Pauses {
    fn new(timeout: Duration) -> Self {
        Self { timeout, last: None, length: Duration::ZERO, longest: BTreeMap::new(), reported: false }
    }

    /// Adds the time since the last tick. Returns the current pause once it is too long.
    fn tick(
        &mut self,
        place: Option<Place>,
        beats: u64,
        passed: Duration,
        awaits_rank: impl FnOnce() -> bool,
    ) -> Option<Pause> {
        let now = place.map(|place| (place, beats));
        if now.is_none() || now != self.last {
            if let Some((place, _)) = self.last {
                let longest = self.longest.entry(place.phase).or_default();
                *longest = self.length.max(*longest);
            }
            (self.last, self.length, self.reported) = (now, Duration::ZERO, false);
            return None;
        }
        self.length += passed;
        let place = place?;
        let longest = self.longest.get(place.phase).copied().unwrap_or_default();
        let mut limit = self.timeout.max(PATIENCE * longest);
        if self.reported || self.length < limit {
            return None;
        }
        if awaits_rank() {
            limit = limit.mul_f64(PATIENCE_WITH_RANKS);
        }
        self.reported = self.length >= limit;
        self.reported.then_some(Pause { place, length: self.length, limit })
    }
}

#[cfg(test)]
mod tests;
