//! Shown metrics of a run.

use firebrick::engine::config::Mode;
use firebrick::engine::metrics::Phase;
use firebrick::report::RunView;

/// Steps between the values of a change.
const CHANGE_STEPS: usize = 10;
/// Newest steps for the estimate of the remaining time.
const RECENT_STEPS: usize = 32;

/// Format of a headline number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Unchanged.
    Number,
    /// In percent.
    Percent,
    /// Unchanged, without its difference.
    Alone,
}

/// A headline number.
#[derive(Clone, Debug, PartialEq)]
pub struct Headline {
    /// Label.
    pub label: &'static str,
    /// Format.
    pub unit: Unit,
    /// Its value in the newest step, or of a validation.
    pub value: Option<f64>,
    /// Its change over the last steps.
    pub change: Option<f64>,
}

/// Part of a step in a phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhasePart {
    /// Its name.
    pub name: &'static str,
    /// Seconds.
    pub seconds: f64,
    /// Fraction of the step.
    pub share: f64,
    /// Most bytes.
    pub bytes: Option<u64>,
    /// Predicted bytes.
    pub planned: Option<u64>,
}

/// Label, metric and format. A name with a final `/` means the first metric below it.
type HeadlineMetric = (&'static str, &'static str, Unit);

/// Headline metrics of reinforcement learning, without the loss, which says little of a policy gradient.
const RL: [HeadlineMetric; 6] = [
    ("reward", "critic/score/mean", Unit::Number),
    ("validation", "val-core/", Unit::Alone),
    ("truncated", "response_length/clip_ratio", Unit::Percent),
    ("no spread", "frac_reward_zero_std", Unit::Percent),
    ("entropy", "actor/entropy", Unit::Number),
    ("mismatch", "training/rollout_probs_diff_mean", Unit::Alone),
];

/// Headline metrics of supervised training.
const SFT: [HeadlineMetric; 6] = [
    ("loss", "train/loss", Unit::Number),
    ("validation", "val/loss", Unit::Alone),
    ("perplexity", "val/perplexity", Unit::Alone),
    ("grad norm", "actor/grad_norm", Unit::Number),
    ("rate", "actor/lr", Unit::Alone),
    ("epoch", "training/epoch", Unit::Alone),
];

/// Times of validations and checkpoints, outside of steps.
const OUTSIDE: [&str; 4] =
    ["timing_s/testing", "timing_s/testing_reward", "timing_s/val_loss", "timing_s/save_checkpoint"];

/// Returns true if a metric is shown.
pub fn is_shown(name: &str) -> bool {
    let headlines = RL.iter().chain(&SFT);
    let mut shown = headlines.map(|(_, shown, _)| *shown).chain(["timing_s/", THROUGHPUT, PEAK_GIB]);
    shown.any(|shown| name == shown || shown.ends_with('/') && name.starts_with(shown))
}

/// Tokens per second.
pub const THROUGHPUT: &str = "perf/throughput";

const PEAK_GIB: &str = "perf/max_memory_allocated_gb";

fn headline_metrics(run: &RunView) -> [HeadlineMetric; 6] {
    match run.mode {
        Mode::Rl => RL,
        Mode::Sft => SFT,
    }
}

/// Names and metrics of the curves: reward or loss, validation, truncation or gradient norm.
pub fn curves(run: &RunView) -> [(&'static str, &'static str); 3] {
    let metrics = headline_metrics(run);
    let third = if run.mode == Mode::Rl { 2 } else { 3 };
    [0, 1, third].map(|at| (metrics[at].0, metrics[at].1))
}

/// The headline numbers.
pub fn headlines(run: &RunView) -> Vec<Headline> {
    let steps = run.scalars.curve("timing_s/step");
    let before = steps.get(steps.len().saturating_sub(CHANGE_STEPS + 1)).map(|point| point.0);
    let before = before.filter(|&step| step < run.step as f64);
    let headline = |(label, name, unit)| {
        let value = run.value(name);
        let earlier = run.scalars.curve(name).iter().rev().find(|point| Some(point.0) == before);
        let earlier = earlier.map(|point| point.1).filter(|_| unit != Unit::Alone);
        Headline { label, unit, value, change: value.zip(earlier).map(|(a, b)| a - b) }
    };
    headline_metrics(run).into_iter().map(headline).collect()
}

/// The phases of the newest step, in its order.
pub fn phases(run: &RunView) -> Vec<PhasePart> {
    let timed = Phase::ALL.into_iter().filter_map(|phase| {
        let name = format!("timing_s/{phase}");
        let seconds = run.value(&name).filter(|_| !OUTSIDE.contains(&name.as_str()))?;
        Some((phase, seconds))
    });
    let timed: Vec<(Phase, f64)> = timed.collect();
    let sum: f64 = timed.iter().map(|(_, seconds)| seconds).sum();
    let planned = |phase: Phase| {
        let phases = &run.planned.as_ref()?.phases;
        phase.estimates().iter().filter_map(|name| phases.get(name)).max().copied()
    };
    let part = |(phase, seconds): (Phase, f64)| PhasePart {
        name: phase.name(),
        seconds,
        share: seconds / sum.max(1e-9),
        bytes: run.memory.newest_bytes(phase),
        planned: planned(phase),
    };
    timed.into_iter().map(part).collect()
}

/// Most bytes of the newest step.
pub fn peak_bytes(run: &RunView) -> Option<u64> {
    run.value(PEAK_GIB).map(|gib| (gib * f64::from(1 << 30)) as u64)
}

/// Seconds of the remaining steps, by the time of the last ones.
pub fn left(run: &RunView) -> Option<f64> {
    let rest = run.steps?.checked_sub(run.step).filter(|&rest| rest > 0)?;
    let steps = run.scalars.curve("timing_s/step");
    let recent = &steps[steps.len().saturating_sub(RECENT_STEPS)..];
    let first = recent.first().filter(|_| run.ended.is_none())?.0;
    let others = OUTSIDE.iter().flat_map(|name| run.scalars.curve(name).iter().filter(|point| point.0 >= first));
    let seconds: f64 = recent.iter().chain(others).map(|point| point.1).sum();
    Some(seconds / recent.len() as f64 * rest as f64)
}
