//! The observer of a run with a live view.

use super::screen::{Screen, UpdateSource};
use super::state::LiveState;
use super::steering::Steering;
use super::theme::Theme;
use crate::log;
use firebrick::engine::config::{Mode, RunConfig};
use firebrick::engine::metrics::{Control, Event, Observer};
use firebrick::report::ViewUpdate;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Sends a run's events to a view, and the keys' requests to the run.
pub struct Feed {
    updates: Sender<ViewUpdate>,
    steering: Arc<Steering>,
    mode: Mode,
    folder: PathBuf,
    spent: Duration,
}

impl Feed {
    /// A feed, and the receiver of its updates.
    pub fn new(config: &RunConfig, mode: Mode, folder: &Path) -> (Self, Receiver<ViewUpdate>) {
        let (updates, arrived) = channel();
        let feed = Self { updates, steering: Arc::default(), mode, folder: folder.to_owned(), spent: Duration::ZERO };
        feed.send(ViewUpdate::opened(folder, mode, Some(config)));
        (feed, arrived)
    }

    /// Requests of the keys.
    pub fn steering(&self) -> &Arc<Steering> {
        &self.steering
    }

    /// Time that the run has spent in this observer.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    fn send(&self, updates: ViewUpdate) {
        // a view that has ended needs no updates
        let _ = self.updates.send(updates);
    }
}

impl Observer for Feed {
    fn event(&mut self, event: Event<'_>) {
        let began = Instant::now();
        for update in ViewUpdate::of_event(&event, self.mode, &self.folder) {
            self.send(update);
        }
        self.spent += began.elapsed();
    }

    fn control(&mut self) -> Control {
        self.steering.control()
    }
}

/// A feed and the screen that shows it.
pub struct Live {
    /// The run's observer.
    pub feed: Feed,
    /// `None` after [`Live::leave`].
    screen: Option<Screen>,
}

impl Live {
    /// Takes over the terminal and shows a run.
    pub fn start(config: &RunConfig, mode: Mode, folder: &Path) -> std::io::Result<Self> {
        let (feed, arrived) = Feed::new(config, mode, folder);
        let steering = Arc::clone(feed.steering());
        let state = LiveState::new(false);
        let source = received(arrived);
        let screen = Screen::start(state, source, Some(steering), Theme::from_environment())?;
        log::to_view(Some(feed.updates.clone()));
        Ok(Self { feed, screen: Some(screen) })
    }

    /// Restores the terminal.
    pub fn leave(&mut self) {
        log::to_view(None);
        if let Some(screen) = self.screen.take() {
            screen.leave();
            let spent = self.feed.spent().as_secs_f64();
            tracing::debug!("live view overhead: {spent:.4} s");
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.leave();
    }
}

/// The updates of a channel so far.
fn received(arrived: Receiver<ViewUpdate>) -> UpdateSource {
    Box::new(move |_| {
        let mut updates = Vec::new();
        loop {
            match arrived.try_recv() {
                Ok(update) => updates.push(update),
                Err(TryRecvError::Disconnected) if updates.is_empty() => return Ok(None),
                Err(_) => return Ok(Some(updates)),
            }
        }
    })
}
