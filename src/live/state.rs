//! What a window shows: a run, and what its keys changed.

use super::steering::Asked;
use firebrick::report::{Pick, RunView, ShownSample, ViewUpdate};
use std::time::Duration;

/// A run as a window shows it.
pub struct LiveState {
    /// The run.
    pub run: RunView,
    /// Whether the run is in another process, so that keys cannot steer it.
    pub watching: bool,
    /// Time since the view began.
    pub clock: Duration,
    /// How long ago the run last wrote a step, of one in another process.
    pub silent: Option<Duration>,
    /// The sample that is shown.
    pub cursor: usize,
    /// What the keys asked of the run.
    pub asked: Asked,
    /// Whether the keys are explained.
    pub help: bool,
    /// Whether it is asked if the run shall end at once.
    pub asking: bool,
}

impl LiveState {
    /// A run of which nothing is known yet.
    pub fn new(watching: bool) -> Self {
        Self {
            run: RunView::new(super::metrics::is_shown),
            watching,
            clock: Duration::ZERO,
            silent: None,
            cursor: 0,
            asked: Asked::default(),
            help: false,
            asking: false,
        }
    }

    /// Applies an update.
    pub fn apply(&mut self, update: ViewUpdate) {
        if matches!(update, ViewUpdate::Opened { .. }) {
            (self.silent, self.asking) = (None, false);
        }
        if matches!(update, ViewUpdate::Opened { .. } | ViewUpdate::Samples { .. }) {
            self.cursor = 0;
        }
        self.run.apply(update, self.clock);
    }

    /// The sample that the cursor is on.
    pub fn current(&self) -> Option<&ShownSample> {
        self.run.samples.get(self.cursor)
    }

    /// The first sample that is shown for a reason.
    pub fn picked(&self, pick: Pick) -> Option<&ShownSample> {
        self.run.samples.iter().find(|shown| shown.pick == pick)
    }

    /// Moves the cursor to the next sample.
    pub fn next_sample(&mut self) {
        self.cursor = (self.cursor + 1) % self.run.samples.len().max(1);
    }
}
