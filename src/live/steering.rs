//! Requests of the keys, until the run polls them.

use firebrick::engine::metrics::Control;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shared by the keys and the observer of a run.
#[derive(Debug, Default)]
pub struct Steering(Mutex<Requests>);

/// Current requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// The run shall wait.
    pub paused: bool,
    /// The run shall write a checkpoint.
    pub saving: bool,
    /// The run shall stop after its step.
    pub stopping: bool,
}

impl Steering {
    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pauses the run, or lets it continue.
    pub fn toggle_pause(&self) {
        self.lock().paused ^= true;
    }

    /// Requests a checkpoint.
    pub fn save(&self) {
        self.lock().saving = true;
    }

    /// Requests a stop after the step, or withdraws it.
    pub fn stop(&self, stop: bool) {
        self.lock().stopping = stop;
    }

    /// Current requests.
    pub fn requests(&self) -> Requests {
        *self.lock()
    }

    /// The run's next action. A checkpoint is requested once.
    pub fn control(&self) -> Control {
        let mut requests = self.lock();
        if requests.stopping {
            Control::Stop
        } else if std::mem::take(&mut requests.saving) {
            Control::Save
        } else if requests.paused {
            Control::Pause
        } else {
            Control::Continue
        }
    }
}
