//! Output of a run: the live view, plain lines, or nothing.

use crate::arguments::RunArgs;
use crate::live::{Live, can_show};
use crate::log;
use crate::output;
use crate::progress::{Progress, summary_lines};
use crate::signals::RunSignals;
use firebrick::engine::config::{Mode, RunConfig};
use firebrick::engine::metrics::{Control, Event, Observer};
use firebrick::report::ViewUpdate;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::Level;

/// Kind of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Show {
    /// The live view.
    Live,
    /// Lines on stderr.
    Lines,
    /// Warnings and errors alone.
    Warnings,
    /// Nothing: of a rank whose messages go to a file.
    Nothing,
}

impl Show {
    /// The output by the arguments and the terminal.
    pub fn new(args: &RunArgs) -> Self {
        if args.quiet {
            Self::Warnings
        } else if args.plain || !can_show() {
            Self::Lines
        } else {
            Self::Live
        }
    }
}

/// The observer of `firebrick train` and `firebrick sft`.
pub struct Console {
    show: Show,
    config: RunConfig,
    mode: Mode,
    folder: PathBuf,
    shown: Shown,
    signals: Arc<RunSignals>,
}

enum Shown {
    Nothing,
    Live(Box<Live>),
    Lines(Progress),
}

impl Console {
    /// The observer of a run. It shows nothing until the run is ready; earlier errors go to stderr.
    pub fn new(show: Show, plain: bool, config: &RunConfig, mode: Mode, signals: Arc<RunSignals>) -> Self {
        Self {
            show,
            config: config.clone(),
            mode,
            folder: PathBuf::new(),
            shown: match show {
                Show::Lines => Shown::Lines(Progress::new(plain)),
                Show::Live | Show::Warnings | Show::Nothing => Shown::Nothing,
            },
            signals,
        }
    }

    fn ready(&mut self, folder: &Path) {
        folder.clone_into(&mut self.folder);
        log::to_folder(folder);
        if self.show != Show::Live {
            return;
        }
        self.shown = match Live::start(&self.config, self.mode, folder) {
            Ok(live) => Shown::Live(Box::new(live)),
            Err(error) => {
                output::message(&format!("warning: no live view, the terminal cannot be used: {error}"));
                Shown::Lines(Progress::new(true))
            }
        };
    }

    /// Writes an event's messages into the run's log, which `firebrick watch` reads.
    fn record(&self, event: &Event<'_>) {
        for update in ViewUpdate::of_event(event, self.mode, &self.folder) {
            match update {
                ViewUpdate::Note(text) => log::record(Level::INFO, &text),
                ViewUpdate::Warning(text) => {
                    log::record(Level::WARN, &text);
                    if self.show == Show::Warnings {
                        output::message(&format!("warning: {text}"));
                    }
                }
                _ => {}
            }
        }
    }
}

impl Observer for Console {
    fn event(&mut self, event: Event<'_>) {
        self.signals.event(&event);
        if let Event::Ready { output, .. } = &event {
            self.ready(output);
        }
        if matches!(event, Event::Ready { .. } | Event::Replanned { .. } | Event::Saved { .. }) {
            self.record(&event);
        }
        match &mut self.shown {
            Shown::Nothing => {}
            Shown::Lines(progress) => progress.event(event),
            Shown::Live(live) => {
                if let Event::Finished(summary) = &event {
                    live.leave();
                    output::message(&summary_lines(summary));
                }
                live.feed.event(event);
            }
        }
    }

    fn control(&mut self) -> Control {
        match (self.signals.control(), &mut self.shown) {
            (Control::Continue, Shown::Live(live)) => live.feed.control(),
            (requested, _) => requested,
        }
    }
}
