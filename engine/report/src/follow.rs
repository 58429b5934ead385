//! A run folder read as it grows.

use super::excerpt::{Excerpt, Pick, picks};
use super::folder::config;
use super::view_update::{Planned, ViewUpdate};
use firebrick_engine::config::{Mode, mode_of, parse};
use firebrick_engine::metrics::{GLOBAL_STEP, LedgerEntry, Metrics};
use firebrick_engine::{Error, Result};
use firebrick_spec::file;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::fs::{File, Metadata};
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Bytes at the end of files that are read first: of samples, readings and log lines only the newest are
/// shown.
const SAMPLES_BYTES: u64 = 8 << 20;
const MEMORY_BYTES: u64 = 1 << 18;
const LOG_BYTES: u64 = 1 << 16;

/// The run's log: lines with a time, a level and a text.
pub const LOG: &str = "run.log";

/// Reads a growing run folder.
pub struct Follower {
    folder: PathBuf,
    config: Option<Stamp>,
    plan: Option<Stamp>,
    ended: bool,
    metrics: Tail,
    samples: Tail,
    memory: Tail,
    log: Tail,
    /// Samples of the newest step.
    newest: Vec<Excerpt>,
}

/// Modification time and length of a file.
type Stamp = (SystemTime, u64);

impl Follower {
    /// Follows the run in a folder.
    ///
    /// # Errors
    ///
    /// [`Error::Report`] for a folder that holds no run.
    pub fn open(folder: &Path) -> Result<Self> {
        config(folder)?;
        let tail = |file: &str, newest| Tail::new(folder.join(file), newest);
        Ok(Self {
            config: None,
            plan: None,
            ended: false,
            metrics: tail("metrics.jsonl", u64::MAX),
            samples: tail("samples.jsonl", SAMPLES_BYTES),
            memory: tail("memory.jsonl", MEMORY_BYTES),
            log: tail(LOG, LOG_BYTES),
            newest: Vec::new(),
            folder: folder.to_owned(),
        })
    }

    /// Updates since the last call; all of them in the first call, and again after a restart or resume of the run.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] for a file that exists but cannot be read, [`Error::Report`] for a folder that no longer holds a
    /// run.
    pub fn poll(&mut self) -> Result<Vec<ViewUpdate>> {
        let mut updates = Vec::new();
        let stamp = stamp(&self.folder.join("config.yaml"));
        let tails = [&self.metrics, &self.samples, &self.memory, &self.log];
        if self.config != stamp || tails.iter().any(|tail| tail.was_replaced()) {
            self.config = stamp;
            self.start_over();
            updates.push(self.opened()?);
        }
        let plan = self::stamp(&self.folder.join("plan.json"));
        if self.plan != plan {
            self.plan = plan;
            updates.extend(Planned::read(&self.folder).map(ViewUpdate::Planned));
        }
        updates.extend(self.metrics.lines()?.iter().filter_map(|line| step(line)));
        updates.extend(self.samples()?);
        let readings = parsed::<LedgerEntry>(&self.memory.lines()?);
        updates.extend((!readings.is_empty()).then_some(ViewUpdate::Memory(readings)));
        updates.extend(self.log.lines()?.iter().filter_map(|line| log_update(line)));
        updates.extend(self.ended());
        Ok(updates)
    }

    /// Time since the run last wrote a step; `None` before the first.
    pub fn silent_for(&self) -> Option<Duration> {
        let (written, _) = stamp(&self.metrics.path)?;
        SystemTime::now().duration_since(written).ok()
    }

    fn start_over(&mut self) {
        for tail in [&mut self.metrics, &mut self.samples, &mut self.memory, &mut self.log] {
            tail.restart();
        }
        self.newest.clear();
        (self.plan, self.ended) = (None, false);
    }

    fn opened(&self) -> Result<ViewUpdate> {
        let config = parse(&config(&self.folder)?, &[]).ok();
        let mode = config.as_ref().map_or(Mode::Rl, mode_of);
        Ok(ViewUpdate::opened(&self.folder, mode, config.as_ref()))
    }

    /// The newest step's samples, if there are new ones.
    fn samples(&mut self) -> Result<Option<ViewUpdate>> {
        let read = parsed::<Excerpt>(&self.samples.lines()?);
        let grown = !read.is_empty();
        for excerpt in read {
            if self.newest.last().is_some_and(|l| l.step != excerpt.step) {
                self.newest.clear();
            }
            self.newest.push(excerpt);
        }
        let rows: Vec<(u64, f64)> = self.newest.iter().map(|e| (e.draw, e.reward.unwrap_or(f64::NAN))).collect();
        let picked = picks(&rows).into_iter();
        let samples: Vec<(Pick, Excerpt)> = picked.map(|(at, pick)| (pick, self.newest[at].clone())).collect();
        let step = self.newest.last().map(|excerpt| excerpt.step);
        Ok(step.filter(|_| grown).map(|step| ViewUpdate::Samples { step, samples }))
    }

    /// The end of the run, once its summary is newer than its start.
    fn ended(&mut self) -> Option<ViewUpdate> {
        let path = self.folder.join("summary.json");
        let (written, _) = stamp(&path)?;
        if self.ended || self.config.is_some_and(|(begun, _)| begun > written) {
            return None;
        }
        let summary: Value = serde_json::from_slice(&file::read(&path, file::MAX_CONFIG_BYTES).ok()?).ok()?;
        self.ended = true;
        Some(ViewUpdate::Ended { steps: summary["steps"].as_u64()? })
    }
}

/// The lines that parse as `T`.
fn parsed<T: DeserializeOwned>(lines: &[Vec<u8>]) -> Vec<T> {
    lines.iter().filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn step(line: &[u8]) -> Option<ViewUpdate> {
    let mut row: Map<String, Value> = serde_json::from_slice(line).ok()?;
    let step = row.remove(GLOBAL_STEP)?.as_u64()?;
    let numbers = row.into_iter();
    let metrics: Metrics = numbers.filter_map(|(name, value)| Some((name, value.as_f64()?))).collect();
    Some(ViewUpdate::Metrics { step, steps: None, metrics })
}

/// The update of a log line.
fn log_update(line: &[u8]) -> Option<ViewUpdate> {
    let line = String::from_utf8_lossy(line);
    let (time, rest) = line.split_once(' ')?;
    // continued lines of a text have no time
    if !time.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let rest = rest.trim();
    let (level, text) = rest.split_once(' ')?;
    let text = text.trim().to_owned();
    match level {
        "WARN" | "ERROR" => Some(ViewUpdate::Warning(text)),
        "INFO" => Some(ViewUpdate::Note(text)),
        _ => None,
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

/// New lines of a growing file.
struct Tail {
    path: PathBuf,
    /// Bytes at its end that are read first.
    newest: u64,
    offset: u64,
    file: Option<u64>,
}

impl Tail {
    fn new(path: PathBuf, newest: u64) -> Self {
        Self { path, newest, offset: 0, file: None }
    }

    fn restart(&mut self) {
        (self.offset, self.file) = (0, None);
    }

    /// Returns true if the file was replaced or has become shorter.
    fn was_replaced(&self) -> bool {
        let Ok(now) = std::fs::metadata(&self.path) else {
            return false;
        };
        now.len() < self.offset || self.file.is_some_and(|file| file != number(&now))
    }

    /// Complete lines since the last call.
    fn lines(&mut self) -> Result<Vec<Vec<u8>>> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(Error::io("read", &self.path)(e)),
        };
        let read = || {
            let metadata = file.metadata()?;
            let first = self.file.is_none();
            self.file = Some(number(&metadata));
            if first {
                self.offset = metadata.len().saturating_sub(self.newest);
            }
            file.seek(SeekFrom::Start(self.offset))?;
            let mut cut = first && self.offset > 0;
            let mut reader = BufReader::new(file.take(metadata.len().saturating_sub(self.offset)));
            let (mut lines, mut line) = (Vec::new(), Vec::new());
            // an incomplete line is read again
            while file::read_line(&mut reader, &mut line)? && line.ends_with(b"\n") {
                self.offset += line.len() as u64;
                line.pop();
                if !std::mem::take(&mut cut) && !line.is_empty() {
                    lines.push(std::mem::take(&mut line));
                }
            }
            Ok(lines)
        };
        read().map_err(Error::io("read", &self.path))
    }
}

/// Identity of a file.
#[cfg(unix)]
fn number(metadata: &Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

/// Identity of a file.
#[cfg(not(unix))]
fn number(metadata: &Metadata) -> u64 {
    let created = metadata.created().ok();
    let since = created.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
#[path = "follow/tests.rs"]
mod tests;
