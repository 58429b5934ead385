//! What the keys ask of a run, until the run asks for it.

use firebrick::engine::metrics::Control;
use std::sync::atomic::{AtomicBool, Ordering};

/// Shared by the keys and the observer of a run.
#[derive(Debug, Default)]
pub struct Steering {
    paused: AtomicBool,
    save: AtomicBool,
    stop: AtomicBool,
}

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
    /// Pauses the run, or lets it continue.
    pub fn toggle_pause(&self) {
        self.paused.fetch_xor(true, Ordering::Relaxed);
    }

    /// Asks for a checkpoint.
    pub fn save(&self) {
        self.save.store(true, Ordering::Relaxed);
    }

    /// Asks the run to stop after its step, or no longer.
    pub fn stop(&self, stop: bool) {
        self.stop.store(stop, Ordering::Relaxed);
    }

    /// What is asked for.
    pub fn asked(&self) -> Asked {
        Asked {
            paused: self.paused.load(Ordering::Relaxed),
            saving: self.save.load(Ordering::Relaxed),
            stopping: self.stop.load(Ordering::Relaxed),
        }
    }

    /// The answer to the run's question. A checkpoint is answered once.
    pub fn control(&self) -> Control {
        let asked = self.asked();
        if asked.stopping {
            Control::Stop
        } else if self.save.swap(false, Ordering::Relaxed) {
            Control::Save
        } else if asked.paused {
            Control::Pause
        } else {
            Control::Continue
        }
    }
}
