//! A team of threads for many short loops, one after the other, as in a decoding step.
//!
//! Rayon's threads go to sleep between two kernels, and a loop that is divided among them is split into jobs that are
//! stolen, which together take longer than a kernel of a few rows. A team's helpers wait for the next loop with their
//! eyes open, for a while: a loop begins when a number changes. Each thread of the team takes the tasks of its own part
//! of a loop one by one, then those that the others have not taken yet.
//!
//! Helpers are threads of rayon's pool. The leader never waits for one to begin, only for tasks that one has taken:
//! where the machine has no core for a helper, the leader runs all tasks.

#![allow(unsafe_code, reason = "a loop's body is on the leader's stack")]

use crate::device::is_cpu;
use burn::tensor::Device;
use std::any::Any;
use std::cell::{Cell, RefCell, UnsafeCell};
use std::mem::transmute;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a helper waits for the next loop before it goes back to the pool: longer than the host works between two
/// steps.
const IDLE_TIMEOUT: Duration = Duration::from_micros(300);

/// Pauses of the processor after which a thread that waits lets others have its core, some ten microseconds.
const PAUSES: u32 = 1 << 10;

/// Most tasks of a loop: a part of it has 32 bits for those that are left.
const MAX_TASKS: usize = u32::MAX as usize;

/// The body of a loop: runs the tasks of a thread, as they are taken.
type Body<'a> = dyn Fn(&mut dyn Iterator<Item = usize>) + Sync + 'a;

thread_local! {
    /// The team that this thread leads.
    static TEAM: RefCell<Option<Arc<Team>>> = const { RefCell::new(None) };
    /// True if its loops run on the team now.
    static LEADS: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` with a team, where the device is the CPU: the loops of its kernels are divided among the team's threads,
/// as many as rayon's pool has.
pub fn with_team<R>(device: &Device, work: impl FnOnce() -> R) -> R {
    /// Ends it, if by a panic.
    struct Led;

    impl Drop for Led {
        fn drop(&mut self) {
            LEADS.set(false);
        }
    }

    let threads = rayon::current_num_threads();
    if !is_cpu(device) || threads == 1 || LEADS.get() {
        return work();
    }
    TEAM.with_borrow_mut(|team| {
        if team.as_ref().is_none_or(|team| team.parts.len() != threads) {
            *team = Some(Arc::new(Team::new(threads)));
        }
    });
    LEADS.set(true);
    let _led = Led;
    work()
}

/// Runs tasks on the team that this thread leads now. `body` gets the tasks of a thread as they are taken. False, and
/// nothing is done, where there is no team or it is busy.
pub fn run_on_team(tasks: usize, body: &Body<'_>) -> bool {
    if !LEADS.get() || tasks > MAX_TASKS {
        return false;
    }
    let team = TEAM.with_borrow(Option::clone);
    let Some(team) = team else { return false };
    // a task that divides its own work does it alone, by rayon
    LEADS.set(false);
    team.lead(tasks, body);
    LEADS.set(true);
    true
}

/// Returns true if loops of this thread run on a team, which divides them in less than a microsecond.
pub fn leads() -> bool {
    LEADS.get()
}

/// State that the threads of a team share.
struct Team {
    /// The number of the loop that runs or ran last.
    published: Padded<AtomicU32>,
    /// The loop. Written by the leader while no task of the last one is left, read by those who have taken a task and
    /// not given it back.
    job: UnsafeCell<Job>,
    /// The part of the loop that each thread begins with: the loop's number in the high half, tasks that nobody has
    /// taken in the low one.
    parts: Box<[Padded<AtomicU64>]>,
    /// Tasks that helpers have run.
    done: Padded<AtomicUsize>,
    /// Helpers that are not there, nor called.
    absent: Padded<AtomicUsize>,
    /// True for each thread that is.
    present: Box<[AtomicBool]>,
    /// The panic of a helper's task.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// A loop.
#[derive(Clone, Copy)]
struct Job {
    tasks: usize,
    body: &'static Body<'static>,
}

/// A value with two cache lines of its own: processors prefetch the neighbour of a line.
#[repr(align(128))]
struct Padded<T>(T);

// SAFETY: all fields but `job` are shared between threads already, and access to `job` is ordered by `parts` and `done`
// as it says.
unsafe impl Sync for Team {}
// SAFETY: as above.
unsafe impl Send for Team {}

fn pack(number: u32, left: usize) -> u64 {
    (u64::from(number) << 32) | left as u64
}

fn unpack(part: u64) -> (u32, usize) {
    ((part >> 32) as u32, (part & u64::from(u32::MAX)) as usize)
}

impl Team {
    fn new(threads: usize) -> Self {
        let padded = |_| Padded(AtomicU64::new(0));
        Self {
            published: Padded(AtomicU32::new(0)),
            job: UnsafeCell::new(Job { tasks: 0, body: &|_| {} }),
            parts: (0..threads).map(padded).collect(),
            done: Padded(AtomicUsize::new(0)),
            absent: Padded(AtomicUsize::new(threads - 1)),
            present: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            panic: Mutex::new(None),
        }
    }

    /// Runs a loop; helpers take part as far as they are there.
    fn lead(self: &Arc<Self>, tasks: usize, body: &Body<'_>) {
        if self.absent.0.load(Relaxed) > 0 {
            self.call();
        }
        // SAFETY: the reference is used until every task is run, which `Led` waits for before this function ends.
        // Nobody reads the last loop any more: each of its tasks has been given back, which the leader has seen in
        // `done`.
        unsafe {
            let body = transmute::<&Body<'_>, &'static Body<'static>>(body);
            *self.job.get() = Job { tasks, body };
        }
        let number = self.published.0.load(Relaxed).wrapping_add(1);
        self.done.0.store(0, Relaxed);
        for (i, part) in self.parts.iter().enumerate() {
            let left = self.begin(tasks, i + 1) - self.begin(tasks, i);
            // a part without tasks keeps the number of an earlier loop, which is as good: its cache line stays where it
            // is
            if left > 0 {
                part.0.store(pack(number, left), Release);
            }
        }
        self.published.0.store(number, Release);
        {
            let mut led = Led { team: self, tasks, claims: Claims::new(self, number, 0) };
            body(&mut led.claims);
        }
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// The first task of a part of a loop.
    fn begin(&self, tasks: usize, part: usize) -> usize {
        tasks * part / self.parts.len()
    }

    /// Calls the helpers that are not there.
    #[cold]
    fn call(self: &Arc<Self>) {
        for seat in 1..self.parts.len() {
            if !self.present[seat].swap(true, Acquire) {
                self.absent.0.fetch_sub(1, Relaxed);
                let team = self.clone();
                rayon::spawn(move || team.help(seat));
            }
        }
    }

    /// A helper: takes part in loops until none has come for a while.
    fn help(&self, seat: usize) {
        // it may be called for a loop that runs already
        let mut seen = self.published.0.load(Relaxed).wrapping_sub(1);
        let mut idle = Idle::new();
        while !idle.is_over() {
            let number = self.published.0.load(Acquire);
            if number != seen {
                seen = number;
                self.take_part(number, seat);
                idle = Idle::new();
            } else if idle.wait() {
                if rayon::yield_now() == Some(rayon::Yield::Executed) {
                    idle = Idle::new();
                } else {
                    std::thread::yield_now();
                }
            }
        }
        self.absent.0.fetch_add(1, Relaxed);
        self.present[seat].store(false, Release);
    }

    /// Runs tasks of a loop until all are taken.
    fn take_part(&self, number: u32, seat: usize) {
        let mut claims = Claims::new(self, number, seat);
        claims.held = claims.next();
        if claims.held.is_none() {
            return;
        }
        // SAFETY: a task was taken, and the leader waits until it is given back below.
        let body = unsafe { (*self.job.get()).body };
        let ran = catch_unwind(AssertUnwindSafe(|| body(&mut claims)));
        if let Err(panic) = ran {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        self.done.0.fetch_add(claims.taken, Release);
    }
}

/// The tasks of a loop that a thread takes: those of its own part first.
struct Claims<'a> {
    team: &'a Team,
    number: u32,
    /// The part that tasks are taken from now, and those that were empty.
    part: usize,
    empty: usize,
    /// A task that was taken before the iteration.
    held: Option<usize>,
    taken: usize,
}

impl<'a> Claims<'a> {
    fn new(team: &'a Team, number: u32, part: usize) -> Self {
        Self { team, number, part, empty: 0, held: None, taken: 0 }
    }

    /// Takes a task of the present part.
    fn take(&mut self) -> Option<usize> {
        let part = &self.team.parts[self.part].0;
        let mut current = part.load(Acquire);
        loop {
            let (number, left) = unpack(current);
            if number != self.number || left == 0 {
                return None;
            }
            match part.compare_exchange_weak(current, current - 1, Acquire, Acquire) {
                Ok(_) => {
                    self.taken += 1;
                    // SAFETY: a task was taken, and the leader waits until it is given back.
                    let tasks = unsafe { (*self.team.job.get()).tasks };
                    return Some(self.team.begin(tasks, self.part + 1) - left);
                }
                Err(now) => current = now,
            }
        }
    }
}

impl Iterator for Claims<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if let Some(held) = self.held.take() {
            return Some(held);
        }
        let parts = self.team.parts.len();
        while self.empty < parts {
            if let Some(task) = self.take() {
                return Some(task);
            }
            self.empty += 1;
            self.part = (self.part + 1) % parts;
        }
        None
    }
}

/// The leader's part in a loop. It ends when no task is left, after a panic too: helpers use what is on the leader's
/// stack.
struct Led<'a> {
    team: &'a Team,
    tasks: usize,
    claims: Claims<'a>,
}

impl Drop for Led<'_> {
    fn drop(&mut self) {
        // none are left unless the leader's own task panicked
        while self.claims.next().is_some() {}
        let helped = self.tasks - self.claims.taken;
        let mut idle = Idle::new();
        while self.team.done.0.load(Acquire) != helped {
            if idle.wait() {
                std::thread::yield_now();
            }
        }
    }
}

/// Time that a thread has waited.
struct Idle {
    pauses: u32,
    since: Option<Instant>,
}

impl Idle {
    fn new() -> Self {
        Self { pauses: 0, since: None }
    }

    /// Waits for a moment. Returns true if the thread should let others have its core.
    fn wait(&mut self) -> bool {
        if self.pauses < PAUSES {
            self.pauses += 1;
            std::hint::spin_loop();
            return false;
        }
        self.since.get_or_insert_with(Instant::now);
        true
    }

    /// Returns true if it has waited for [`IDLE_TIMEOUT`].
    fn is_over(&self) -> bool {
        self.since.is_some_and(|since| since.elapsed() > IDLE_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;
    use std::thread;

    /// Number of runs of each of `tasks` tasks.
    fn hits(tasks: usize) -> Vec<usize> {
        let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        let ran = run_on_team(tasks, &|tasks| {
            for task in tasks {
                hits[task].fetch_add(1, Relaxed);
            }
        });
        assert!(ran, "no team");
        hits.into_iter().map(AtomicUsize::into_inner).collect()
    }

    /// Runs on a thread of a pool of three, whatever the machine has.
    fn of_three<R: Send>(work: impl FnOnce() -> R + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build();
        pool.expect("threads").install(work)
    }

    #[test]
    fn every_task_of_a_loop_runs_once() {
        of_three(|| {
            for round in 0..300 {
                with_team(&Device::flex(), || {
                    for tasks in [0, 1, 2, 3, 7, 200] {
                        assert_eq!(hits(tasks), vec![1; tasks], "round {round}");
                    }
                });
                if round % 100 == 0 {
                    // helpers go, and are called again
                    thread::sleep(3 * IDLE_TIMEOUT);
                }
            }
        });
        assert!(!run_on_team(1, &|_| {}), "a team without a leader");
    }

    #[test]
    fn a_loop_ends_although_no_helper_comes() {
        of_three(|| {
            let busy = Arc::new(AtomicUsize::new(0));
            let over = Arc::new(AtomicBool::new(false));
            for _ in 0..2 {
                let (busy, over) = (busy.clone(), over.clone());
                rayon::spawn(move || {
                    busy.fetch_add(1, Relaxed);
                    while !over.load(Relaxed) {
                        thread::yield_now();
                    }
                });
            }
            while busy.load(Relaxed) < 2 {
                thread::yield_now();
            }
            with_team(&Device::flex(), || assert_eq!(hits(50), [1; 50]));
            over.store(true, Relaxed);
        });
    }

    #[test]
    fn a_panic_of_any_task_comes_through_when_all_others_have_ended() {
        of_three(|| {
            for bad in [0, 20, 63] {
                let ended = AtomicUsize::new(0);
                let led = catch_unwind(AssertUnwindSafe(|| {
                    with_team(&Device::flex(), || {
                        run_on_team(64, &|tasks| {
                            for task in tasks {
                                assert!(task != bad, "task {task}");
                                thread::sleep(Duration::from_micros(50));
                                ended.fetch_add(1, Relaxed);
                            }
                        })
                    })
                }));
                assert!(led.is_err(), "task {bad}");
                let before = ended.load(Relaxed);
                thread::sleep(Duration::from_millis(2));
                assert_eq!(ended.load(Relaxed), before, "a task ran on");
                with_team(&Device::flex(), || assert_eq!(hits(9), [1; 9]));
            }
        });
    }

    #[test]
    fn threads_lead_teams_of_their_own_and_tasks_may_divide_their_work() {
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    of_three(|| {
                        with_team(&Device::flex(), || {
                            let sum = AtomicUsize::new(0);
                            run_on_team(20, &|tasks| {
                                for task in tasks {
                                    assert!(!run_on_team(10, &|_| {}), "a task leads no team");
                                    (0..10).into_par_iter().for_each(|part| {
                                        sum.fetch_add(task * 10 + part, Relaxed);
                                    });
                                }
                            });
                            assert_eq!(sum.into_inner(), (0..200).sum::<usize>());
                        });
                    });
                });
            }
        });
    }
}
