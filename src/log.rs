//! Where log lines go: to stderr, into the run's `run.log`, and to the live view while that has the terminal.

use crate::output::{self, Stderr};
use firebrick::report::{LOG, ViewUpdate};
use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of lines that are kept for a run folder that is not known yet.
const EARLY: usize = 1 << 16;

static ROUTE: Mutex<Route> = Mutex::new(Route { rank: 0, early: String::new(), file: None, view: None });

struct Route {
    /// The rank of this process: rank 0 has `run.log` and stderr, the others a file each.
    rank: usize,
    /// Lines from before the run folder is known.
    early: String,
    file: Option<File>,
    view: Option<Sender<ViewUpdate>>,
}

fn route() -> MutexGuard<'static, Route> {
    ROUTE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How much a line of the log matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What a run does.
    Info,
    /// What somebody should look at.
    Warn,
}

/// The writer of `tracing`: a call for each event.
#[derive(Clone, Copy, Debug)]
pub struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        let mut route = route();
        route.keep(line.trim_end());
        route.tell(line.trim());
        // the terminal belongs to the view while there is one
        let seen = route.view.is_some() && std::io::stderr().is_terminal() || route.rank > 0;
        drop(route);
        if !seen {
            Stderr.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Stderr.flush()
    }
}

/// Makes this process' log that of a rank of several: `logs/rank-N.log`, and nothing on stderr.
pub fn of_rank(rank: usize) {
    route().rank = rank;
}

/// Writes the log into a run folder from now on, what was said before it was known first. A log that cannot be written
/// is told of and not written: the run continues.
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

/// Tells a view of warnings from now on, or no longer.
pub fn to_view(view: Option<Sender<ViewUpdate>>) {
    route().view = view;
}

/// Writes a line into the run's log alone: its reader has seen it.
pub fn record(level: Level, text: &str) {
    let level = match level {
        Level::Info => " INFO",
        Level::Warn => " WARN",
    };
    route().keep(&format!("{level} {text}"));
}

impl Route {
    fn keep(&mut self, line: &str) {
        let line = format!("{} {}\n", now(), line.replace('\n', "\n    "));
        if self.file.is_some() {
            self.write(&line);
        } else if self.early.len() + line.len() <= EARLY {
            self.early += &line;
        }
    }

    fn write(&mut self, text: &str) {
        let written = self.file.as_mut().map(|f| f.write_all(text.as_bytes()));
        // a full disk ends the run where it matters; the log is not worth more than one message
        if let Some(Err(error)) = written {
            self.file = None;
            let lost = format!("the run's log ends here, it cannot be written: {error}");
            match &self.view {
                Some(view) => drop(view.send(ViewUpdate::Warning(lost))),
                None => output::message(&format!("warning: {lost}")),
            }
        }
    }

    fn tell(&self, line: &str) {
        let Some((view, (level, text))) = self.view.as_ref().zip(line.split_once(' ')) else {
            return;
        };
        let text = text.trim().to_owned();
        let news = match level {
            "WARN" | "ERROR" => ViewUpdate::Warning(text),
            _ => ViewUpdate::Note(text),
        };
        // a view that has ended needs no news
        let _ = view.send(news);
    }
}

/// The time in UTC, to the second, as RFC 3339 writes it.
fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    utc(since.map_or(0, |since| since.as_secs()))
}

/// A time in seconds since 1970.
fn utc(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // years of 365.2425 days that begin in March, in eras of 400 (H. Hinnant, "chrono-compatible low-level date
    // algorithms")
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn a_time_is_written_as_rfc_3339_writes_it() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_399_323), "2026-11-23T02:02:03Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
