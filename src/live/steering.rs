//! What the keys ask of a run, until the run asks for it.

use firebrick::engine::metrics::Control;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Shared by the keys and the observer of a run.
#[derive(Debug, Default)]
pub struct Steering(Mutex<Asked>);

/// What is asked for at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The run is to wait.
    pub paused: bool,
    /// A checkpoint is to be written.
    pub saving: bool,
    /// The run is to stop after its step.
    pub stopping: bool,
}

impl Steering {
    fn lock(&self) -> MutexGuard<'_, Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pauses the run, or lets it continue.
    pub fn toggle_pause(&self) {
        self.lock().paused ^= true;
    }

    /// Asks for a checkpoint.
    pub fn save(&self) {
        self.lock().saving = true;
    }

    /// Asks the run to stop after its step, or no longer.
    pub fn stop(&self, stop: bool) {
        self.lock().stopping = stop;
    }

    /// What is asked for.
    pub fn asked(&self) -> Asked {
        *self.lock()
    }

    /// The answer to the run's question. A checkpoint is answered once.
    pub fn control(&self) -> Control {
        let mut asked = self.lock();
        if asked.stopping {
            Control::Stop
        } else if std::mem::take(&mut asked.saving) {
            Control::Save
        } else if asked.paused {
            Control::Pause
        } else {
            Control::Continue
        }
    }
}
