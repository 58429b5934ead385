//! The observer of a run that is shown where it runs.

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

/// Tells a view what a run's events say, and the run what the keys ask.
pub struct Feed {
    news: Sender<ViewUpdate>,
    steering: Arc<Steering>,
    mode: Mode,
    folder: PathBuf,
    spent: Duration,
}

impl Feed {
    /// A feed, and where its news arrive.
    pub fn new(config: &RunConfig, mode: Mode, folder: &Path) -> (Self, Receiver<ViewUpdate>) {
        let (news, arrived) = channel();
        let feed = Self { news, steering: Arc::default(), mode, folder: folder.to_owned(), spent: Duration::ZERO };
        feed.send(ViewUpdate::opened(folder, mode, Some(config)));
        (feed, arrived)
    }

    /// What the keys change.
    pub fn steering(&self) -> &Arc<Steering> {
        &self.steering
    }

    /// Time that the run has spent here.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    fn send(&self, news: ViewUpdate) {
        // a view that has ended needs no news
        let _ = self.news.send(news);
    }
}

impl Observer for Feed {
    fn event(&mut self, event: Event<'_>) {
        let began = Instant::now();
        for news in ViewUpdate::of_event(&event, self.mode, &self.folder) {
            self.send(news);
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
    /// None once it has been left.
    screen: Option<Screen>,
}

impl Live {
    /// Takes the terminal and shows a run that is ready.
    pub fn start(config: &RunConfig, mode: Mode, folder: &Path) -> std::io::Result<Self> {
        let (feed, arrived) = Feed::new(config, mode, folder);
        let steering = Arc::clone(feed.steering());
        let state = LiveState::new(false);
        let source = received(arrived);
        let screen = Screen::start(state, source, Some(steering), Theme::of_environment())?;
        log::to_view(Some(feed.news.clone()));
        Ok(Self { feed, screen: Some(screen) })
    }

    /// Gives the terminal back.
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

/// The news of a channel, as far as they have arrived.
fn received(arrived: Receiver<ViewUpdate>) -> UpdateSource {
    Box::new(move |_| {
        let mut news = Vec::new();
        loop {
            match arrived.try_recv() {
                Ok(one) => news.push(one),
                Err(TryRecvError::Disconnected) if news.is_empty() => return Ok(None),
                Err(_) => return Ok(Some(news)),
            }
        }
    })
}
