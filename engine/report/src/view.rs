//! State of a live view, in bounded memory, from a run's events or folder.

use super::excerpt::{Excerpt, Pick};
use super::memory::MemoryHistory;
use super::reader::AnswerReader;
use super::scalars::Scalars;
use super::text::Text;
use super::view_update::{Planned, ViewUpdate};
use firebrick_engine::config::Mode;
use firebrick_engine::metrics::Metrics;
use std::collections::VecDeque;
use std::time::Duration;

/// Longest kept prompt or completion, in bytes.
const MAX_TEXT_BYTES: usize = 4000;
/// Most kept notes.
const MAX_NOTES: usize = 200;

/// Seconds of a step, in metrics.
const STEP_SECONDS: &str = "timing_s/step";
/// Seconds of a validation, in metrics.
const VALIDATION_SECONDS: &str = "timing_s/testing";

/// A run, fed by [`ViewUpdate`]s.
pub struct RunView {
    /// The run folder's name.
    pub name: String,
    /// The kind of training.
    pub mode: Mode,
    /// Finished steps.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// The step of the warm-up, its steps, its loss.
    pub warm_up: Option<(u64, u64, Option<f64>)>,
    /// The running phase, and its start.
    pub phase: Option<(&'static str, Duration)>,
    /// Steps after which the run ended.
    pub ended: Option<u64>,
    /// Metrics by step.
    pub scalars: Scalars,
    /// Predictions of the plan.
    pub planned: Option<Planned>,
    /// Readings of phases.
    pub memory: MemoryHistory,
    /// Samples of the newest step with samples, the newest first.
    pub samples: Vec<ShownSample>,
    /// Notes, the oldest first.
    pub notes: VecDeque<Note>,
    /// Warnings so far.
    pub warnings: usize,
    /// Reader of answers in completions.
    pub reader: AnswerReader,
    /// Returns true for metrics to keep.
    keeps: fn(&str) -> bool,
    /// End of the newest step.
    stepped: Duration,
}

/// A message of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// True for a warning.
    pub warning: bool,
    /// The text.
    pub text: String,
    /// Finished steps at its last occurrence.
    pub step: u64,
    /// Number of occurrences.
    pub count: usize,
}

/// A shown sample.
#[derive(Clone, Debug, PartialEq)]
pub struct ShownSample {
    /// Reason.
    pub pick: Pick,
    /// The sample, with long texts cut.
    pub excerpt: Excerpt,
    /// The answers in it, by the rule's name.
    pub read: Vec<(String, Option<String>)>,
}

impl RunView {
    /// An empty view, which keeps the metrics that `keeps` selects.
    pub fn new(keeps: fn(&str) -> bool) -> Self {
        Self {
            name: String::new(),
            mode: Mode::Rl,
            step: 0,
            steps: None,
            warm_up: None,
            phase: None,
            ended: None,
            scalars: Scalars::default(),
            planned: None,
            memory: MemoryHistory::default(),
            samples: Vec::new(),
            notes: VecDeque::new(),
            warnings: 0,
            reader: AnswerReader::None,
            keeps,
            stepped: Duration::ZERO,
        }
    }

    /// Applies an update at the time `now` since the view began.
    pub fn apply(&mut self, update: ViewUpdate, now: Duration) {
        match update {
            ViewUpdate::Opened { name, mode, task, steps } => {
                *self = Self { name, mode, steps, reader: AnswerReader::new(task.as_ref()), ..Self::new(self.keeps) };
            }
            ViewUpdate::Planned(planned) => self.planned = Some(planned),
            ViewUpdate::Phase { phase, .. } => self.phase = Some((phase, now)),
            ViewUpdate::WarmUp { step, steps, loss } => self.warm_up = Some((step, steps, loss)),
            ViewUpdate::Metrics { step, steps, metrics } => {
                self.steps = steps.or(self.steps);
                self.step_ended(step, metrics, now);
            }
            ViewUpdate::Samples { samples, .. } => {
                self.samples = samples.into_iter().map(|(pick, excerpt)| self.shown(pick, excerpt)).collect();
            }
            ViewUpdate::Memory(entries) => {
                for entry in &entries {
                    self.memory.add(entry);
                }
                self.memory.keep_newest();
            }
            ViewUpdate::Note(text) => self.note(false, text),
            ViewUpdate::Warning(text) => self.note(true, text),
            ViewUpdate::Ended { steps } => {
                self.ended = Some(steps);
                self.phase = None;
            }
        }
    }

    /// The value of a metric in the newest step; of a validation metric, in the newest step with one.
    pub fn value(&self, name: &str) -> Option<f64> {
        self.scalars.since(if name.starts_with("val") { 0 } else { self.step }, name)
    }

    fn step_ended(&mut self, step: u64, mut metrics: Metrics, now: Duration) {
        if metrics.contains_key(STEP_SECONDS) {
            self.stepped = now;
        } else if step > 0 {
            // the validation after a step, which took until now
            metrics.insert(VALIDATION_SECONDS.to_owned(), now.saturating_sub(self.stepped).as_secs_f64());
        }
        self.step = step;
        self.phase = None;
        if step > 0 {
            self.warm_up = None;
        }
        self.scalars.add(step, metrics.into_iter().filter(|(name, _)| (self.keeps)(name)));
        self.scalars.bound();
    }

    fn note(&mut self, warning: bool, text: String) {
        self.warnings += usize::from(warning);
        let step = self.step;
        match self.notes.back_mut() {
            Some(last) if last.text == text => {
                last.count += 1;
                last.step = step;
            }
            _ => self.notes.push_back(Note { warning, text, step, count: 1 }),
        }
        if self.notes.len() > MAX_NOTES {
            self.notes.pop_front();
        }
    }

    /// Reads answers in the complete text, then cuts it.
    fn shown(&self, pick: Pick, mut excerpt: Excerpt) -> ShownSample {
        let read = self.reader.read(&excerpt).into_iter();
        let read = read.map(|(name, text)| (name, text.map(Text::joined))).collect();
        for text in [&mut excerpt.prompt, &mut excerpt.completion, &mut excerpt.answer] {
            if text.len() > MAX_TEXT_BYTES {
                *text = Text::new(text, MAX_TEXT_BYTES).joined();
            }
        }
        ShownSample { pick, excerpt, read }
    }
}
