//! Signals. SIGINT and SIGTERM end a run after its step, with a checkpoint, if that is soon, else at once; a second one
//! ends it at once. SIGUSR1 saves. SIGHUP, of a terminal that is gone, does not end a run. Other signals, and those of
//! other commands, restore the terminal and do what they do by default.

use crate::live::restore;
use crate::step_clock::StepClock;
use crate::{log, output};
use firebrick::engine::checkpoint::RunDir;
use firebrick::engine::config::{Mode, RunConfig};
use firebrick::engine::metrics::{Control, Event};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::Level;

/// Number of Ctrl-C's signal on all systems.
const SIGINT: i32 = 2;

/// The run of this process.
static RUN: OnceLock<Arc<RunSignals>> = OnceLock::new();

/// Requests of signals to a run.
pub struct RunSignals {
    clock: Mutex<StepClock>,
    grace: Duration,
    /// The rank, if there are several.
    rank: Option<usize>,
    /// The run folder.
    folder: PathBuf,
    stopping: AtomicBool,
    saving: AtomicBool,
}

impl RunSignals {
    /// Handles signals for the run of this process from now on.
    pub fn begin(config: &RunConfig, mode: Mode, rank: Option<usize>) -> Arc<Self> {
        let run = Self {
            clock: Mutex::new(StepClock::new(config.trainer.test_freq, mode, Instant::now())),
            grace: Duration::try_from_secs_f64(config.trainer.grace_seconds).unwrap_or(Duration::MAX),
            rank,
            folder: config.output.clone(),
            stopping: AtomicBool::new(false),
            saving: AtomicBool::new(false),
        };
        let run = Arc::clone(RUN.get_or_init(|| Arc::new(run)));
        if !handle() {
            tracing::warn!("signals cannot be handled, so they end the run at once");
        }
        run
    }

    fn clock(&self) -> MutexGuard<'_, StepClock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows an event of the run.
    pub fn event(&self, event: &Event<'_>) {
        self.clock().event(event, Instant::now());
    }

    /// The request between two steps.
    pub fn control(&self) -> Control {
        self.clock().between_steps(Instant::now());
        if self.stopping.load(Ordering::SeqCst) {
            Control::Stop
        } else if self.saving.swap(false, Ordering::SeqCst) {
            Control::Save
        } else {
            Control::Continue
        }
    }

    /// Ends the run after its step, or at once.
    fn stop(&'static self, signal: i32) {
        let name = name(signal);
        if self.stopping.swap(true, Ordering::SeqCst) {
            self.end(signal, &format!("a second signal ({name})"));
        }
        let clock = self.clock();
        let (step, remaining) = (clock.step(), clock.remaining(Instant::now()));
        drop(clock);
        let grace = self.grace.as_secs_f64();
        match remaining {
            Some(left) if left <= self.grace => {
                let left = left.as_secs_f64();
                within_a_second(move || {
                    tracing::warn!(
                        "{name}: the run ends with a checkpoint after step {step}, predicted in {left:.1} s; a second \
                         signal ends it at once"
                    );
                });
                let thread = std::thread::Builder::new().name("grace".into());
                // without it, a second signal or the queue ends a step that takes longer
                let _ = thread.spawn(move || {
                    std::thread::sleep(self.grace);
                    let clock = self.clock();
                    let is_saved = clock.is_over() || clock.may_save();
                    drop(clock);
                    if !is_saved {
                        self.end(signal, &format!("{name}, and trainer.grace_seconds ({grace}) have passed"));
                    }
                });
            }
            Some(left) => {
                let left = left.as_secs_f64();
                self.end(signal, &format!("{name}: {left:.1} s to a checkpoint, trainer.grace_seconds is {grace}"));
            }
            None => self.end(signal, &format!("{name}: no earlier step predicts when this one ends")),
        }
    }

    /// Ends the process in the middle of a step.
    fn end(&self, signal: i32, reason: &str) -> ! {
        restore();
        let rank = self.rank.map_or(String::new(), |rank| format!("rank {rank}: "));
        let mut clock = self.clock();
        if let Ok(checkpoints) = RunDir::read_only(&self.folder).checkpoints() {
            clock.found(checkpoints.last().map(|(step, _)| *step));
        }
        let text = format!("{rank}the run ended at once ({reason}): {}", clock.lost());
        drop(clock);
        within_a_second(move || {
            log::record(Level::WARN, &text);
            output::message(&text);
        });
        end_by(signal)
    }
}

/// Writes a message, unless a reader of stderr that has stopped reading holds it up.
fn within_a_second(write: impl FnOnce() + Send + 'static) {
    let (written, is_written) = channel();
    let thread = std::thread::Builder::new().name("message".into());
    let spawned = thread.spawn(move || {
        write();
        // nobody waits longer than a second
        let _ = written.send(());
    });
    if spawned.is_ok() {
        let _ = is_written.recv_timeout(Duration::from_secs(1));
    }
}

/// Ends the run as Ctrl-C does, or at once.
pub fn interrupt(at_once: bool) {
    match RUN.get() {
        Some(run) if at_once => run.end(SIGINT, "asked for by q"),
        Some(run) => run.stop(SIGINT),
        None => {
            restore();
            end_by(SIGINT)
        }
    }
}

#[cfg(unix)]
mod system {
    use super::{RUN, restore};
    use crate::live::continued;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::{emulate_default_handler, exit, raise, signal_name};
    use std::sync::OnceLock;
    use std::sync::atomic::Ordering;

    static HANDLED: OnceLock<bool> = OnceLock::new();

    /// Handles signals from now on. Returns false if the system refuses.
    pub fn handle() -> bool {
        *HANDLED.get_or_init(|| {
            let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1]) else {
                return false;
            };
            let thread = std::thread::Builder::new().name("signals".into());
            let spawned = thread.spawn(move || signals.forever().for_each(act));
            spawned.is_ok()
        })
    }

    fn act(signal: i32) {
        match (signal, RUN.get()) {
            (SIGINT | SIGTERM, Some(run)) => run.stop(signal),
            (SIGUSR1, Some(run)) => run.saving.store(true, Ordering::SeqCst),
            (SIGHUP, Some(_)) => tracing::warn!("SIGHUP: the terminal is gone, the run continues"),
            (SIGTSTP, _) => {
                restore();
                // stops the program here until it continues
                let _ = emulate_default_handler(signal);
                continued();
            }
            _ => {
                restore();
                end_by(signal)
            }
        }
    }

    /// Ends the process by a signal.
    pub fn end_by(signal: i32) -> ! {
        // the first process of a container has no default action
        if std::process::id() != 1 {
            let _ = emulate_default_handler(signal);
        }
        exit(128 + signal)
    }

    pub fn name(signal: i32) -> &'static str {
        signal_name(signal).unwrap_or("a signal")
    }

    /// Stops the program as Ctrl-Z does.
    pub fn suspend() {
        restore();
        let _ = raise(SIGTSTP);
    }
}

#[cfg(not(unix))]
mod system {
    /// Ctrl-C is a key of the live view.
    pub fn handle() -> bool {
        true
    }

    /// Ends the process as a signal does.
    pub fn end_by(signal: i32) -> ! {
        std::process::exit(128 + signal)
    }

    pub fn name(_signal: i32) -> &'static str {
        "Ctrl-C"
    }

    /// Does nothing: there is no Ctrl-Z.
    pub fn suspend() {}
}

use system::{end_by, name};
pub use system::{handle, suspend};
