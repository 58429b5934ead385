//! `TensorBoard`: event files in `tensorboard/` of the run folder.

use super::event_file::{EventFile, EventProto};
use super::{TrackedRun, Tracker, TrackerResult, code_block};
use crate::metrics::described::Metrics;
use std::path::PathBuf;

/// Maximum bytes of pending records; more are dropped.
const MAX_PENDING: usize = 4 << 20;

/// Maximum characters of the configuration's YAML.
const MAX_CONFIG_CHARS: usize = 100_000;

/// Writes one event file per session, in `tensorboard/` of the run folder: metrics as scalars, the configuration and
/// some samples as texts.
///
/// A resumed session writes its first step; `TensorBoard` then drops the values of earlier sessions from that step on.
/// If a write fails, its records are kept and written with the next.
#[derive(Debug, Default)]
pub struct TensorBoard {
    folder: PathBuf,
    file: Option<EventFile>,
    /// Records that are not in the file yet.
    pending: Vec<u8>,
    /// First records of the file, until it exists.
    head: Vec<u8>,
}

impl TensorBoard {
    /// The folder of event files in the run folder.
    pub const FOLDER: &str = "tensorboard";

    /// A tracker that has no run yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn write(&mut self, event: &EventProto) -> TrackerResult {
        event.frame(&mut self.pending);
        let written = self.flush();
        if written.is_err() && self.pending.len() > MAX_PENDING {
            self.pending.clear();
        }
        Ok(written.map_err(|error| format!("cannot write to {}: {error}", self.folder.display()))?)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(EventFile::create(&self.folder)?),
        };
        if !self.head.is_empty() {
            file.append(&self.head)?;
            self.head = Vec::new();
        }
        file.append(&self.pending)?;
        self.pending.clear();
        Ok(())
    }
}

impl Tracker for TensorBoard {
    fn name(&self) -> &'static str {
        "tensorboard"
    }

    fn begin(&mut self, run: &TrackedRun<'_>) -> TrackerResult {
        self.folder = run.folder.join(Self::FOLDER);
        let first = run.last_step.map_or(0, |last| last + 1);
        EventProto::version().frame(&mut self.head);
        EventProto::session_start(first).frame(&mut self.head);
        self.write(&EventProto::text(first, "config", &code_block(run.yaml, MAX_CONFIG_CHARS)))
    }

    fn metrics(&mut self, step: u64, metrics: &Metrics) -> TrackerResult {
        self.write(&EventProto::scalars(step, metrics.iter()))
    }

    fn text(&mut self, step: u64, name: &str, markdown: &str) -> TrackerResult {
        self.write(&EventProto::text(step, name, markdown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;
    use serde_json::Value;
    use std::path::Path;

    fn begin(tracker: &mut TensorBoard, folder: &Path, last_step: Option<u64>) -> TrackerResult {
        tracker.begin(&TrackedRun {
            folder,
            project: "p",
            name: "r",
            config: &Value::Null,
            yaml: "output: x\n",
            last_step,
        })
    }

    fn metrics(value: f64) -> Metrics {
        Metrics::from([("actor/lr".to_owned(), value)])
    }

    /// The events of all files of a run, in the order in which `TensorBoard` reads them.
    fn events(folder: &Path) -> Vec<EventProto> {
        let files = std::fs::read_dir(folder.join(TensorBoard::FOLDER)).unwrap();
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        let mut events = Vec::new();
        for file in files {
            let bytes = std::fs::read(file).unwrap();
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                events.push(EventProto::decode(&rest[12..12 + length]).unwrap());
                rest = &rest[16 + length..];
            }
        }
        events
    }

    fn scalars(events: &[EventProto]) -> Vec<(i64, f32)> {
        let values = events.iter().flat_map(|event| {
            let values = event.summary.iter().flat_map(|s| &s.value);
            values.filter_map(|v| Some((event.step, v.simple_value?)))
        });
        values.collect()
    }

    #[test]
    fn a_session_that_goes_on_adds_a_file_that_says_where_it_begins() {
        let temp = tempfile::tempdir().unwrap();
        let mut first = TensorBoard::new();
        begin(&mut first, temp.path(), None).unwrap();
        for step in 0..3 {
            first.metrics(step, &metrics(step as f64)).unwrap();
        }
        let mut second = TensorBoard::new();
        begin(&mut second, temp.path(), Some(1)).unwrap();
        second.metrics(2, &metrics(f64::NAN)).unwrap();
        let events = events(temp.path());
        let starts: Vec<i64> =
            events.iter().filter(|event| event.session_log.is_some()).map(|event| event.step).collect();
        assert_eq!(starts, [0, 2]);
        let scalars = scalars(&events);
        assert_eq!(scalars[..3], [(0, 0.0), (1, 1.0), (2, 2.0)]);
        assert!(scalars[3].0 == 2 && scalars[3].1.is_nan());
    }

    #[test]
    fn what_could_not_be_written_is_written_once_it_can_be() {
        let temp = tempfile::tempdir().unwrap();
        // a file is where the folder should be
        let in_the_way = temp.path().join(TensorBoard::FOLDER);
        std::fs::write(&in_the_way, "").unwrap();
        let mut tracker = TensorBoard::new();
        let error = begin(&mut tracker, temp.path(), None).unwrap_err();
        assert!(error.to_string().contains("tensorboard"), "{error}");
        assert!(tracker.metrics(0, &metrics(0.5)).is_err());
        std::fs::remove_file(&in_the_way).unwrap();
        tracker.metrics(1, &metrics(1.5)).unwrap();
        let events = events(temp.path());
        assert!(events[0].file_version.is_some() && events[1].session_log.is_some());
        assert_eq!(scalars(&events), [(0, 0.5), (1, 1.5)]);
    }

    #[test]
    fn a_folder_that_can_never_be_written_to_takes_no_more_memory_than_it_may() {
        let temp = tempfile::tempdir().unwrap();
        std::fs::write(temp.path().join(TensorBoard::FOLDER), "").unwrap();
        let mut tracker = TensorBoard::new();
        assert!(begin(&mut tracker, temp.path(), None).is_err());
        let text = "x".repeat(MAX_PENDING / 8);
        for step in 0..100 {
            assert!(tracker.text(step, "long", &text).is_err());
            assert!(tracker.pending.len() <= MAX_PENDING);
        }
    }
}
