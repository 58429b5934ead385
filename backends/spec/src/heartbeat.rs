//! Heartbeats and waits of threads, from which a watchdog tells a slow run from one that hangs.
//!
//! Code beats after each piece of work: a micro-batch, a decoding step, a tensor of a file. Before it blocks on another
//! process, rank, thread or device, it registers the wait with a description, which costs nothing while nobody looks.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Beats of threads that follow no pulse: workers, which may work for any run of the process.
static WORKERS: AtomicU64 = AtomicU64::new(0);
static WAITS: Mutex<Vec<(u64, Waiting)>> = Mutex::new(Vec::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static PULSE: RefCell<Option<Pulse>> = const { RefCell::new(None) };
    static SYSTEM_ID: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Beats of a run's thread.
#[derive(Clone, Debug, Default)]
pub struct Pulse(Arc<Counted>);

#[derive(Debug, Default)]
struct Counted {
    beats: AtomicU64,
    /// Id of the thread in the system; 0 where it is unknown.
    thread: AtomicU32,
}

impl Pulse {
    /// Counts the beats of this thread from now on, and no other pulse does.
    pub fn follow_this_thread(&self) {
        self.0.thread.store(system_id().unwrap_or(0), Relaxed);
        PULSE.set(Some(self.clone()));
    }

    /// Id in the system of the thread that it follows, where it is known.
    pub fn thread(&self) -> Option<u32> {
        Some(self.0.thread.load(Relaxed)).filter(|id| *id > 0)
    }

    /// Beats so far, those of workers included.
    pub fn beats(&self) -> u64 {
        self.0.beats.load(Relaxed) + WORKERS.load(Relaxed)
    }

    /// Returns true if it follows the waiting thread.
    pub fn follows(&self, waiting: &Waiting) -> bool {
        waiting.pulse.as_ref().is_some_and(|pulse| Arc::ptr_eq(&pulse.0, &self.0))
    }
}

/// Reports progress of this thread.
pub fn beat() {
    PULSE.with_borrow(|pulse| pulse.as_ref().map_or(&WORKERS, |pulse| &pulse.0.beats).fetch_add(1, Relaxed));
}

/// A wait of a thread.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// Id of the thread in the system, where it is known (on Linux).
    pub thread: Option<u32>,
    /// Awaited process, thread, file or device.
    pub what: String,
    /// Awaited rank of the run.
    pub rank: Option<usize>,
    /// Its begin.
    pub since: Instant,
    pulse: Option<Pulse>,
}

impl Waiting {
    /// Returns true if the thread is a worker: no pulse follows it.
    pub fn is_of_worker(&self) -> bool {
        self.pulse.is_none()
    }
}

/// A registered wait; it ends when dropped.
#[derive(Debug)]
#[must_use = "a wait ends when it is dropped"]
pub struct Wait(u64);

impl Wait {
    /// Lets another thread say that what is awaited has come.
    pub fn awaited(&self) -> Awaited {
        Awaited(self.0)
    }
}

/// What a registered wait waits for.
#[derive(Clone, Copy, Debug)]
pub struct Awaited(u64);

impl Awaited {
    /// It has come: no other rank is late now, but the thread that waits. Does nothing if the wait has ended.
    pub fn has_come(self) {
        if let Some((_, waiting)) = registered().iter_mut().find(|(id, _)| *id == self.0) {
            waiting.rank = None;
            waiting.what.push_str(", which has come");
        }
    }
}

/// Registers a wait of this thread.
pub fn wait_for(what: impl Into<String>) -> Wait {
    register(what.into(), None)
}

/// Registers a wait of this thread for another rank.
pub fn wait_for_rank(rank: usize, what: impl Into<String>) -> Wait {
    register(what.into(), Some(rank))
}

/// Waits of all threads, the latest of each last.
pub fn waits() -> Vec<Waiting> {
    registered().iter().map(|(_, waiting)| waiting.clone()).collect()
}

fn register(what: String, rank: Option<usize>) -> Wait {
    let pulse = PULSE.with_borrow(Clone::clone);
    let waiting = Waiting { thread: system_id(), what, rank, since: Instant::now(), pulse };
    let id = NEXT.fetch_add(1, Relaxed);
    registered().push((id, waiting));
    Wait(id)
}

fn registered() -> MutexGuard<'static, Vec<(u64, Waiting)>> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Wait {
    fn drop(&mut self) {
        registered().retain(|(id, _)| *id != self.0);
    }
}

/// Id of this thread in the system.
fn system_id() -> Option<u32> {
    SYSTEM_ID.get().or_else(|| {
        let link = std::fs::read_link(Path::new("/proc/thread-self")).ok()?;
        let id = link.file_name()?.to_str()?.parse().ok();
        SYSTEM_ID.set(id);
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_thread_beats_for_its_run_and_a_worker_for_all() {
        let [first, second] = [Pulse::default(), Pulse::default()];
        let own = |pulse: &Pulse| pulse.0.beats.load(Relaxed);
        thread::scope(|scope| {
            scope.spawn(|| {
                first.follow_this_thread();
                beat();
                beat();
            });
        });
        assert_eq!([own(&first), own(&second)], [2, 0]);
        let before = second.beats();
        thread::scope(|scope| {
            scope.spawn(beat);
        });
        assert!(second.beats() > before);
    }

    #[test]
    fn a_wait_is_listed_with_its_run_until_it_ends() {
        let pulse = Pulse::default();
        pulse.follow_this_thread();
        let listed = || waits().into_iter().filter(|waiting| pulse.follows(waiting)).collect::<Vec<_>>();
        let outer = wait_for("scores");
        let inner = wait_for_rank(3, "rank 3");
        let waits: Vec<_> = listed().into_iter().map(|waiting| (waiting.what, waiting.rank)).collect();
        assert_eq!(waits, [("scores".to_owned(), None), ("rank 3".to_owned(), Some(3))]);
        drop(outer);
        assert_eq!(listed().len(), 1);
        drop(inner);
        assert!(listed().is_empty());
    }

    #[test]
    fn a_thread_that_does_not_go_on_when_a_rank_has_answered_waits_for_no_rank() {
        let pulse = Pulse::default();
        pulse.follow_this_thread();
        let wait = wait_for_rank(3, "rank 3");
        let awaited = wait.awaited();
        awaited.has_come();
        let listed = || waits().into_iter().filter(|waiting| pulse.follows(waiting)).collect::<Vec<_>>();
        let [waiting] = &listed()[..] else { panic!("one wait") };
        assert_eq!((waiting.what.as_str(), waiting.rank), ("rank 3, which has come", None));
        drop(wait);
        awaited.has_come();
        assert!(listed().is_empty());
    }
}
