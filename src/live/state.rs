//! What the view knows of a run: plain data, and how news change it.

use super::steering::Asked;
use firebrick::engine::config::Mode;
use firebrick::engine::metrics::{Metrics, Phase};
use firebrick::report::{AnswerReader, Excerpt, Pick, Planned, Text, ViewUpdate};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Bytes of a prompt or a completion that are kept.
const LONGEST: usize = 4000;
/// Notes that are kept.
const NOTES: usize = 200;
/// Steps that a change is taken over.
const CHANGE: usize = 10;
/// Steps whose mean time says how long the rest takes.
const RECENT: usize = 32;

/// A run as it is shown.
pub struct LiveState {
    /// The run folder's name.
    pub name: String,
    /// Which kind of training.
    pub mode: Mode,
    /// Whether the run is in another process, so that keys cannot steer it.
    pub watching: bool,
    /// Time since the view began.
    pub clock: Duration,
    /// How long ago the run last wrote a step, of one in another process.
    pub silent: Option<Duration>,
    /// Finished steps.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: Option<u64>,
    /// The step of the warm-up, its steps, its loss.
    pub warm_up: Option<(u64, u64, Option<f64>)>,
    /// The phase that runs, and when it began.
    pub phase: Option<(&'static str, Duration)>,
    /// Steps after which the run ended.
    pub ended: Option<u64>,
    /// Metrics of the newest step.
    pub metrics: Metrics,
    /// The curves.
    pub curves: Curves,
    /// What the plan predicts.
    pub planned: Option<Planned>,
    /// Most bytes by phase, in the newest step.
    pub memory: BTreeMap<String, u64>,
    /// The step of the samples.
    pub sampled: u64,
    /// Its samples, the newest first.
    pub samples: Vec<Shown>,
    /// The one that is shown.
    pub cursor: usize,
    /// What was said, the oldest first.
    pub notes: VecDeque<Note>,
    /// Warnings so far.
    pub warnings: usize,
    /// What the keys asked of the run.
    pub asked: Asked,
    /// Whether the keys are explained.
    pub help: bool,
    /// Whether it is asked if the run shall end at once.
    pub asking: bool,
    reader: AnswerReader,
    headlines: VecDeque<Vec<Option<f64>>>,
    seconds: VecDeque<f64>,
    stepped: Duration,
}

/// Values by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    /// Mean reward; the loss in supervised training.
    pub training: Vec<(f64, f64)>,
    /// Reward of the held-out prompts; the loss of held-out examples in supervised training.
    pub validation: Vec<(f64, f64)>,
    /// Share of truncated completions; the gradient norm in supervised training.
    pub third: Vec<(f64, f64)>,
}

/// Something that was said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Whether somebody should look at it.
    pub warning: bool,
    /// The text.
    pub text: String,
    /// Finished steps when it was said last.
    pub step: u64,
    /// How often it was said.
    pub count: usize,
}

/// A sample as it is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Why.
    pub pick: Pick,
    /// What it is, long texts cut.
    pub excerpt: Excerpt,
    /// What the grader read in it, by the rule's name.
    pub read: Vec<(String, Option<String>)>,
}

/// How a headline number is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// As it is.
    Number,
    /// In percent.
    Percent,
    /// As it is, without its change.
    Alone,
}

/// A headline number.
#[derive(Clone, Debug, PartialEq)]
pub struct Headline {
    /// What it is called.
    pub label: &'static str,
    /// How it is written.
    pub unit: Unit,
    /// Its value in the newest step that has it.
    pub value: Option<f64>,
    /// Its change over the last steps.
    pub change: Option<f64>,
}

/// The part of a step that a phase was.
#[derive(Clone, Debug, PartialEq)]
pub struct PhasePart {
    /// Its name.
    pub name: &'static str,
    /// Seconds.
    pub seconds: f64,
    /// Share of the step.
    pub share: f64,
    /// Most bytes.
    pub bytes: Option<u64>,
    /// Predicted bytes.
    pub planned: Option<u64>,
}

/// A label, the metric, how it is written. A name that ends in `/` is that of the first metric below it.
type HeadlineMetric = (&'static str, &'static str, Unit);

/// What tells how reinforcement learning does. Not the loss: that of a policy gradient says little.
const RL: [HeadlineMetric; 6] = [
    ("reward", "critic/score/mean", Unit::Number),
    ("validation", "val-core/", Unit::Alone),
    ("truncated", "response_length/clip_ratio", Unit::Percent),
    ("no spread", "frac_reward_zero_std", Unit::Percent),
    ("entropy", "actor/entropy", Unit::Number),
    ("mismatch", "training/rollout_probs_diff_mean", Unit::Alone),
];

/// The same of supervised training.
const SFT: [HeadlineMetric; 6] = [
    ("loss", "train/loss", Unit::Number),
    ("validation", "val/loss", Unit::Alone),
    ("perplexity", "val/perplexity", Unit::Alone),
    ("grad norm", "actor/grad_norm", Unit::Number),
    ("rate", "actor/lr", Unit::Alone),
    ("epoch", "training/epoch", Unit::Alone),
];

/// What the third curve shows.
const THIRD: [&str; 2] = ["response_length/clip_ratio", "actor/grad_norm"];

/// Time of a validation, which is part of no step.
const VALIDATION: [&str; 3] = ["testing", "testing_reward", "val_loss"];

impl LiveState {
    /// A run of which nothing is known yet.
    pub fn new(watching: bool) -> Self {
        Self {
            name: String::new(),
            mode: Mode::Rl,
            watching,
            clock: Duration::ZERO,
            silent: None,
            step: 0,
            steps: None,
            warm_up: None,
            phase: None,
            ended: None,
            metrics: Metrics::new(),
            curves: Curves::default(),
            planned: None,
            memory: BTreeMap::new(),
            sampled: 0,
            samples: Vec::new(),
            cursor: 0,
            notes: VecDeque::new(),
            warnings: 0,
            asked: Asked::default(),
            help: false,
            asking: false,
            reader: AnswerReader::None,
            headlines: VecDeque::new(),
            seconds: VecDeque::new(),
            stepped: Duration::ZERO,
        }
    }

    /// Takes news in.
    pub fn apply(&mut self, news: ViewUpdate) {
        match news {
            ViewUpdate::Opened { name, mode, task, steps } => {
                *self = Self {
                    name,
                    mode,
                    steps,
                    reader: AnswerReader::new(task.as_ref()),
                    clock: self.clock,
                    asked: self.asked,
                    help: self.help,
                    ..Self::new(self.watching)
                };
            }
            ViewUpdate::Planned(planned) => self.planned = Some(planned),
            ViewUpdate::Phase { phase, .. } => self.phase = Some((phase, self.clock)),
            ViewUpdate::WarmUp { step, steps, loss } => self.warm_up = Some((step, steps, loss)),
            ViewUpdate::Metrics { step, steps, metrics } => {
                self.steps = steps.or(self.steps);
                self.step_ended(step, metrics);
            }
            ViewUpdate::Samples { step, samples } => {
                self.sampled = step;
                self.samples = samples.into_iter().map(|(pick, excerpt)| self.shown(pick, excerpt)).collect();
                self.cursor = 0;
            }
            ViewUpdate::Memory(phases) => self.memory = phases,
            ViewUpdate::Note(text) => self.note(false, text),
            ViewUpdate::Warning(text) => self.note(true, text),
            ViewUpdate::Ended { steps } => {
                self.ended = Some(steps);
                self.phase = None;
            }
        }
    }

    fn step_ended(&mut self, step: u64, metrics: Metrics) {
        let seconds = |name: &str| metrics.get(&format!("timing_s/{name}")).copied();
        match seconds("step") {
            Some(own) => {
                let validation: f64 = VALIDATION.iter().filter_map(|name| seconds(name)).sum();
                push(&mut self.seconds, own + validation, RECENT);
                self.stepped = self.clock;
                // the last validation stays
                self.metrics.retain(|name, _| name.starts_with("val"));
            }
            // the validation after a step, which took until now
            None => {
                let since = self.clock.saturating_sub(self.stepped).as_secs_f64();
                if let Some(last) = self.seconds.back_mut() {
                    *last += since;
                }
            }
        }
        self.step = step;
        self.phase = None;
        if step > 0 {
            self.warm_up = None;
        }
        let third = THIRD[usize::from(self.mode == Mode::Sft)];
        let found = [0, 1].map(|at| find(&metrics, self.sources()[at].1));
        let values = [found[0], found[1], metrics.get(third).copied()];
        let is_step = metrics.contains_key("timing_s/step");
        self.metrics.extend(metrics);
        if is_step {
            let values = self.sources().map(|source| find(&self.metrics, source.1));
            push(&mut self.headlines, values.to_vec(), CHANGE + 1);
        }
        let curves = &mut self.curves;
        let curves = [&mut curves.training, &mut curves.validation, &mut curves.third];
        for (curve, value) in curves.into_iter().zip(values) {
            let Some(value) = value else { continue };
            match curve.last_mut() {
                // told twice
                Some(last) if last.0 >= step as f64 => last.1 = value,
                _ => curve.push((step as f64, value)),
            }
        }
    }

    fn sources(&self) -> [HeadlineMetric; 6] {
        match self.mode {
            Mode::Rl => RL,
            Mode::Sft => SFT,
        }
    }

    /// The headline numbers.
    pub fn headlines(&self) -> Vec<Headline> {
        let sources = self.sources();
        let headline = |(at, (label, name, unit)): (usize, HeadlineMetric)| {
            let value = find(&self.metrics, name);
            let before = self.headlines.front().and_then(|values| values[at]);
            let several = self.headlines.len() > 1 && unit != Unit::Alone;
            Headline { label, unit, value, change: value.zip(before).filter(|_| several).map(|(a, b)| a - b) }
        };
        sources.into_iter().enumerate().map(headline).collect()
    }

    /// The phases of the newest step, in its order.
    pub fn phases(&self) -> Vec<PhasePart> {
        let seconds = |phase: &Phase| self.metrics.get(&format!("timing_s/{phase}")).copied();
        let own = Phase::ALL.iter().filter(|phase| !VALIDATION.contains(&phase.name()));
        let timed: Vec<(&Phase, f64)> = own.filter_map(|p| Some((p, seconds(p)?))).collect();
        let sum: f64 = timed.iter().map(|(_, seconds)| seconds).sum();
        let planned = |phase: &Phase| {
            let phases = &self.planned.as_ref()?.phases;
            let estimates = phase.estimates().iter();
            estimates.filter_map(|name| phases.get(name)).max().copied()
        };
        let parts = timed.into_iter();
        parts
            .map(|(phase, seconds)| PhasePart {
                name: phase.name(),
                seconds,
                share: seconds / sum.max(1e-9),
                bytes: self.memory.get(phase.name()).copied(),
                planned: planned(phase),
            })
            .collect()
    }

    /// Most bytes of the newest step.
    pub fn peak_bytes(&self) -> Option<u64> {
        let gib = self.metrics.get("perf/max_memory_allocated_gb")?;
        Some((gib * f64::from(1 << 30)) as u64)
    }

    /// Seconds that the rest takes, if its steps take as long as the last ones.
    pub fn left(&self) -> Option<f64> {
        let rest = self.steps?.checked_sub(self.step).filter(|&rest| rest > 0);
        let mean = self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64;
        let known = !self.seconds.is_empty() && self.ended.is_none();
        rest.filter(|_| known).map(|rest| mean * rest as f64)
    }

    /// The sample that the cursor is on.
    pub fn current(&self) -> Option<&Shown> {
        self.samples.get(self.cursor)
    }

    /// The first sample that is shown for a reason.
    pub fn picked(&self, pick: Pick) -> Option<&Shown> {
        self.samples.iter().find(|shown| shown.pick == pick)
    }

    /// Moves the cursor to the next sample.
    pub fn next_sample(&mut self) {
        self.cursor = (self.cursor + 1) % self.samples.len().max(1);
    }

    fn note(&mut self, warning: bool, text: String) {
        self.warnings += usize::from(warning);
        let step = self.step;
        match self.notes.back_mut() {
            Some(last) if last.text == text => {
                last.count += 1;
                last.step = step;
            }
            _ => {
                let note = Note { warning, text, step, count: 1 };
                push(&mut self.notes, note, NOTES);
            }
        }
    }

    /// What the grader read is read from the whole completion; what is kept of it is cut.
    fn shown(&self, pick: Pick, mut excerpt: Excerpt) -> Shown {
        let read = self.reader.read(&excerpt.completion).into_iter();
        let read = read.map(|(name, text)| (name, text.map(whole)));
        let read = read.collect();
        for text in [&mut excerpt.prompt, &mut excerpt.completion, &mut excerpt.answer] {
            if text.len() > LONGEST {
                *text = whole(Text::new(text, LONGEST));
            }
        }
        Shown { pick, excerpt, read }
    }
}

/// A metric by its name, or the first below it.
fn find(metrics: &Metrics, name: &str) -> Option<f64> {
    if !name.ends_with('/') {
        return metrics.get(name).copied();
    }
    let mut below = metrics.range(name.to_owned()..);
    let first = below.next().filter(|(found, _)| found.starts_with(name));
    first.map(|(_, value)| *value)
}

fn whole(text: Text) -> String {
    match text {
        Text::Whole(text) => text,
        Text::Cut { head, tail, .. } => format!("{head}…{tail}"),
    }
}

fn push<T>(list: &mut VecDeque<T>, value: T, most: usize) {
    if list.len() == most {
        list.pop_front();
    }
    list.push_back(value);
}
