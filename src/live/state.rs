//! State of a window: a run, and the effects of the keys.

use super::steering::Requests;
use firebrick::report::{Pick, RunView, ShownSample, ViewUpdate};
use std::time::Duration;

/// State of a window.
pub struct LiveState {
    /// The run.
    pub run: RunView,
    /// True if the run is in another process, so that keys cannot steer it.
    pub watching: bool,
    /// Time since the view began.
    pub clock: Duration,
    /// Time since a run in another process last wrote a step.
    pub silent: Option<Duration>,
    /// The index of the shown sample.
    pub cursor: usize,
    /// Requests of the keys.
    pub requests: Requests,
    /// True while the help is shown.
    pub help: bool,
    /// True while the view asks whether to end now.
    pub confirms_end: bool,
}

impl LiveState {
    /// An empty state.
    pub fn new(watching: bool) -> Self {
        Self {
            run: RunView::new(super::metrics::is_shown),
            watching,
            clock: Duration::ZERO,
            silent: None,
            cursor: 0,
            requests: Requests::default(),
            help: false,
            confirms_end: false,
        }
    }

    /// Applies an update.
    pub fn apply(&mut self, update: ViewUpdate) {
        if matches!(update, ViewUpdate::Opened { .. }) {
            (self.silent, self.confirms_end) = (None, false);
        }
        if matches!(update, ViewUpdate::Opened { .. } | ViewUpdate::Samples { .. }) {
            self.cursor = 0;
        }
        self.run.apply(update, self.clock);
    }

    /// The sample at the cursor.
    pub fn current(&self) -> Option<&ShownSample> {
        self.run.samples.get(self.cursor)
    }

    /// The first sample with this reason.
    pub fn picked(&self, pick: Pick) -> Option<&ShownSample> {
        self.run.samples.iter().find(|shown| shown.pick == pick)
    }

    /// Moves the cursor to the next sample.
    pub fn next_sample(&mut self) {
        self.cursor = (self.cursor + 1) % self.run.samples.len().max(1);
    }
}
