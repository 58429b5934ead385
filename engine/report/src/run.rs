//! Reports of runs.

use super::folder::{config, report_error};
use super::lines::{self, ReadResult};
use super::memory::{MemoryHistory, MemoryReadings, TimelineView};
use super::samples::{self, Files, Limits, RewardHistogram, Samples};
use super::scalars::Scalars;
use super::settings::{Settings, repeats, settings};
use super::tokens::{TOKEN_BYTES, TokenIndex};
use super::view::RunView;
use super::view_update::ViewUpdate;
use firebrick_engine::Result;
use firebrick_engine::config::{Mode, mode_of, parse};
use firebrick_engine::metrics::{MemoryTimeline, TokenLog};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Bytes of all sample texts in a report.
const MAX_TEXT_BYTES: usize = 4_000_000;

/// Parts of `plan.json` that a report omits: the segments of each model, and other group sizes.
const OMITTED_KEYS: [&str; 2] = ["plan", "groups"];

/// The key of logged tokens.
const LOG_TOKENS: &str = "trainer.log_tokens";

/// A report of runs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `firebrick.report`.
    pub format: &'static str,
    /// The version of the format, 1.
    pub version: u64,
    /// The version of the program.
    pub program: &'static str,
    /// The runs, in the given order.
    pub runs: Vec<RunReport>,
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    /// Its folder's name; the path if several runs have one name.
    pub name: String,
    /// Index of the first run with equal settings, except seeds and `output`.
    pub repeats: usize,
    /// Notes on missing and unreadable parts, a sentence each.
    pub notes: Vec<String>,
    /// Every metric of every step.
    pub metrics: Scalars,
    /// Rewards of all samples by step.
    pub rewards: Option<RewardHistogram>,
    /// Selected samples.
    pub samples: Option<Samples>,
    /// Readings at the ends of phases.
    pub memory: Option<MemoryReadings>,
    /// The memory timeline.
    pub timeline: Option<TimelineView>,
    /// `plan.json`, without its segments.
    pub plan: Option<Value>,
    /// `summary.json`, if the run has ended.
    pub summary: Option<Value>,
    /// `config.yaml` as keys and values.
    pub settings: Settings,
}

impl Report {
    /// Reads runs, with the texts of about `most` samples of each, in whole groups.
    ///
    /// # Errors
    ///
    /// `Error::Report` for a folder that holds no run, and for a `config.yaml` that is not YAML; `Error::Io` for a
    /// file that exists but cannot be read.
    pub fn read(folders: &[PathBuf], most: usize) -> Result<Self> {
        let per_run = |bytes: usize| bytes / folders.len().max(1);
        let limits = Limits { samples: most, texts: per_run(MAX_TEXT_BYTES), tokens: per_run(TOKEN_BYTES) };
        let read = folders.iter().map(|folder| run(folder, limits));
        let mut runs = read.collect::<Result<Vec<RunReport>>>()?;
        let names: Vec<String> = runs.iter().map(|run| run.name.clone()).collect();
        for (run, folder) in runs.iter_mut().zip(folders) {
            if names.iter().filter(|name| **name == run.name).count() > 1 {
                run.name = folder.display().to_string();
            }
        }
        let settings: Vec<Settings> = runs.iter().map(|run| run.settings.clone()).collect();
        for (run, first) in runs.iter_mut().zip(repeats(&settings)) {
            run.repeats = first;
        }
        Ok(Self { format: "firebrick.report", version: 1, program: env!("CARGO_PKG_VERSION"), runs })
    }

    /// The report as JSON for an HTML element, without `<`.
    pub fn to_json(&self) -> String {
        let text = serde_json::to_string(self).expect("keys are strings, and values finite or none");
        // these occur only in strings, where an escape is equivalent
        text.replace('<', "\\u003c").replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029")
    }
}

/// Reads a run's folder.
fn run(folder: &Path, limits: Limits) -> Result<RunReport> {
    let yaml = config(folder)?;
    let settings = settings(&yaml).map_err(|error| report_error(folder, error.to_string()))?;
    let mut notes = Vec::new();
    let config = parse(&yaml, &[]).ok();
    if config.is_none() {
        notes.push(
            "config.yaml was written by another version, so the answers that graders parsed from completions are not \
             shown."
                .into(),
        );
    }
    let mut view = RunView::new(|_| true);
    let mode = config.as_ref().map_or(Mode::Rl, mode_of);
    view.apply(ViewUpdate::opened(folder, mode, config.as_ref()), Duration::ZERO);
    let mut noted = |result: ReadResult, name: &str| notes.extend(result.note(name));
    let result;
    (view.scalars, result) = Scalars::read(&folder.join("metrics.jsonl"))?;
    noted(result, "metrics.jsonl");
    let files = Files { samples: &folder.join("samples.jsonl"), tokens: &folder.join(TokenLog::FILE) };
    let (tokens, result) = TokenIndex::read(files.tokens)?;
    let keeps_tokens = settings.get(LOG_TOKENS).is_some_and(|groups| groups != "0");
    if keeps_tokens || result != ReadResult::Missing {
        noted(result, TokenLog::FILE);
    }
    let (samples, result) = samples::read(files, &view.reader, limits, tokens)?;
    noted(result, "samples.jsonl");
    let (samples, rewards) = samples.unzip();
    let result;
    (view.memory, result) = MemoryHistory::read(&folder.join("memory.jsonl"))?;
    noted(result, "memory.jsonl");
    let timeline = timeline(folder, &mut notes);
    let mut plan = lines::json(folder, "plan.json", "", &mut notes);
    if let Some(Value::Object(plan)) = &mut plan {
        plan.retain(|key, _| !OMITTED_KEYS.contains(&key.as_str()));
    }
    let unfinished = ": the run has not ended";
    let summary = lines::json(folder, "summary.json", unfinished, &mut notes);
    Ok(RunReport {
        name: view.name,
        repeats: 0,
        notes,
        metrics: view.scalars,
        rewards,
        samples,
        memory: view.memory.readings(),
        timeline,
        plan,
        summary,
        settings,
    })
}

/// The timeline, if it exists and can be read.
fn timeline(folder: &Path, notes: &mut Vec<String>) -> Option<TimelineView> {
    if !folder.join(MemoryTimeline::FILE).is_file() {
        let how = "memory.snapshot=N makes the run write one";
        notes.push(format!("There is no {}: {how}.", MemoryTimeline::FILE));
        return None;
    }
    match MemoryTimeline::load(folder) {
        Ok(timeline) => Some(TimelineView::new(timeline)),
        Err(error) => {
            notes.push(format!("{} could not be read: {error}.", MemoryTimeline::FILE));
            None
        }
    }
}
