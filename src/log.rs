//! The log: to stderr, into the run's `run.log`, and to the live view while it has the terminal.

use crate::output::{self, Stderr, printable};
use firebrick::report::{LOG, ViewUpdate};
use jiff::Timestamp;
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::Level;

/// Most buffered bytes before the run folder is known.
const MAX_EARLY_BYTES: usize = 1 << 16;

static ROUTE: Mutex<Route> = Mutex::new(Route { rank: 0, early: String::new(), file: None, view: None });

struct Route {
    /// The rank of this process: rank 0 has `run.log` and stderr, the others a file each.
    rank: usize,
    /// Lines before the run folder is known.
    early: String,
    file: Option<File>,
    view: Option<Sender<ViewUpdate>>,
}

fn route() -> MutexGuard<'static, Route> {
    ROUTE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The writer of `tracing`: a call for each event.
#[derive(Clone, Copy, Debug)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let line = printable(&String::from_utf8_lossy(bytes));
        let mut route = route();
        route.keep(line.trim_end());
        route.send(line.trim());
        // a live view has the terminal
        let is_shown = route.view.is_some() && std::io::stderr().is_terminal() || route.rank > 0;
        drop(route);
        if !is_shown {
            Stderr.write_all(line.as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Stderr.flush()
    }
}

/// Makes this process' log that of a rank of several: `logs/rank-N.log`, and nothing on stderr.
pub fn set_rank(rank: usize) {
    route().rank = rank;
}

/// Writes the log into a run folder from now on, first the buffered lines. A log that cannot be written
/// is reported, and the run continues.
pub fn to_folder(folder: &Path) {
    let path = match route().rank {
        0 => folder.join(LOG),
        rank => folder.join("logs").join(format!("rank-{rank}.log")),
    };
    let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let opened = made.and_then(|()| OpenOptions::new().create(true).append(true).open(&path));
    let mut route = route();
    match opened {
        Ok(file) => {
            route.file = Some(file);
            let early = std::mem::take(&mut route.early);
            route.write(&early);
        }
        Err(error) => {
            drop(route);
            output::message(&format!(
                "warning: there is no log of this run, {} cannot be written: {error}",
                path.display()
            ));
        }
    }
}

/// Sends log lines to a view from now on, or no longer.
pub fn to_view(view: Option<Sender<ViewUpdate>>) {
    route().view = view;
}

/// Writes a line only into the run's log: the user has seen it.
pub fn record(level: Level, text: &str) {
    route().keep(&printable(&format!("{level:>5} {text}")));
}

impl Route {
    fn keep(&mut self, line: &str) {
        // the time in UTC, to the second, as in RFC 3339
        let line = format!("{:.0} {}\n", Timestamp::now(), line.replace('\n', "\n    "));
        if self.file.is_some() {
            self.write(&line);
        } else if self.early.len() + line.len() <= MAX_EARLY_BYTES {
            self.early += &line;
        }
    }

    fn write(&mut self, text: &str) {
        let written = self.file.as_mut().map(|f| f.write_all(text.as_bytes()));
        // a full disk ends the run elsewhere; the log is worth one message
        if let Some(Err(error)) = written {
            self.file = None;
            let lost = format!("the run's log ends here, it cannot be written: {error}");
            match &self.view {
                Some(view) => drop(view.send(ViewUpdate::Warning(lost))),
                None => output::message(&format!("warning: {lost}")),
            }
        }
    }

    fn send(&self, line: &str) {
        let Some((view, (level, text))) = self.view.as_ref().zip(line.split_once(' ')) else {
            return;
        };
        let text = text.trim().to_owned();
        let update = match level {
            "WARN" | "ERROR" => ViewUpdate::Warning(text),
            _ => ViewUpdate::Note(text),
        };
        // a view that has ended needs no updates
        let _ = view.send(update);
    }
}
