//! What a view of a run is told: by the run's events, or by its folder.

use super::excerpt::{Excerpt, Pick, TRUNCATED, picks};
use firebrick_engine::config::Mode;
use firebrick_engine::metrics::{Event, GLOBAL_STEP, LedgerEntry, Metrics, RolloutReport};
use firebrick_engine::plan::PlanReport;
use firebrick_engine::plan::estimate::EstimatePhase;
use firebrick_engine::task::TaskConfig;
use firebrick_sampler::FinishReason;
use std::collections::BTreeMap;
use std::path::Path;

/// Something that a view did not know.
#[derive(Clone, Debug, PartialEq)]
pub enum ViewUpdate {
    /// Which run it is. What was said of another one, or of an earlier session, no longer holds.
    Opened {
        /// The run folder's name.
        name: String,
        /// Which kind of training.
        mode: Mode,
        /// Its task, whose graders say what they read.
        task: Option<TaskConfig>,
        /// Steps of the whole run, where they are known.
        steps: Option<u64>,
    },
    /// The plan in force.
    Planned(Planned),
    /// The phase that runs now.
    Phase {
        /// The step that it belongs to; 0 before the first.
        step: u64,
        /// Its name.
        phase: &'static str,
    },
    /// A step of the supervised warm-up.
    WarmUp {
        /// Finished steps.
        step: u64,
        /// Steps in all.
        steps: u64,
        /// Its loss.
        loss: Option<f64>,
    },
    /// Metrics of a step, or of the validation after it.
    Metrics {
        /// Finished steps.
        step: u64,
        /// Steps of the whole run, where they are known.
        steps: Option<u64>,
        /// Values by name; those that are no numbers are left out.
        metrics: Metrics,
    },
    /// Samples of the newest step, the newest first.
    Samples {
        /// The step.
        step: u64,
        /// Why each is shown, and what it is.
        samples: Vec<(Pick, Excerpt)>,
    },
    /// Most bytes of each phase in a step, by phase.
    Memory(BTreeMap<String, u64>),
    /// Something to be read, which is no cause for worry.
    Note(String),
    /// A warning or an error.
    Warning(String),
    /// The run has ended, after so many steps.
    Ended {
        /// Finished steps.
        steps: u64,
    },
}

/// What a plan predicts, as far as a view shows it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Planned {
    /// Predicted peak.
    pub peak_bytes: u64,
    /// Predicted bytes by phase of the estimate.
    pub phases: BTreeMap<EstimatePhase, u64>,
    /// Predicted seconds of a step.
    pub seconds: f64,
}

impl Planned {
    /// Reads a run folder's `plan.json`; none where it cannot be read.
    #[must_use]
    pub fn read(folder: &Path) -> Option<Self> {
        let text = std::fs::read(folder.join("plan.json")).ok()?;
        let report: PlanReport = serde_json::from_slice(&text).ok()?;
        let phases = report.phases.into_iter();
        Some(Self {
            peak_bytes: report.peak_bytes,
            phases: phases.map(|p| (p.name, p.total_bytes)).collect(),
            seconds: report.seconds.total(),
        })
    }
}

impl ViewUpdate {
    /// What an event of a run of this kind says. The plan is read from the run folder.
    #[must_use]
    pub fn of_event(event: &Event<'_>, mode: Mode, folder: &Path) -> Vec<Self> {
        match event {
            Event::Ready { .. } => ready(event, folder),
            Event::Phase { step, phase } => vec![Self::Phase { step: *step, phase: phase.name() }],
            Event::Replanned { .. } => replanned(event, folder),
            Event::Sft { step, steps, metrics } => match mode {
                Mode::Rl => vec![Self::WarmUp { step: *step, steps: *steps, loss: metrics.get("train/loss").copied() }],
                Mode::Sft => vec![Self::metrics(*step, Some(*steps), metrics)],
            },
            Event::Step { step, steps, metrics, report } => {
                let samples = report
                    .rollout
                    .as_ref()
                    .map(|rollout| Self::Samples { step: *step, samples: samples(*step, rollout) });
                let memory = report.memory.as_ref();
                let memory = memory.map(|memory| Self::Memory(most(&memory.readings)));
                let metrics = Self::metrics(*step, Some(*steps), metrics);
                [Some(metrics), samples, memory].into_iter().flatten().collect()
            }
            Event::Validated { step, metrics } => vec![Self::metrics(*step, None, metrics)],
            Event::Saved { path } => vec![Self::Note(saved(path))],
            Event::Finished(summary) => vec![Self::Ended { steps: summary.steps }],
        }
    }

    fn metrics(step: u64, steps: Option<u64>, metrics: &Metrics) -> Self {
        let finite = metrics.iter().filter(|(_, value)| value.is_finite());
        let named = finite.filter(|(name, _)| name.as_str() != GLOBAL_STEP);
        Self::Metrics { step, steps, metrics: named.map(|(name, value)| (name.clone(), *value)).collect() }
    }
}

fn ready(event: &Event<'_>, folder: &Path) -> Vec<ViewUpdate> {
    let Event::Ready { device, params, trainable, resumed_from, filtered, validation, .. } = event else {
        return Vec::new();
    };
    let mut news: Vec<ViewUpdate> = Planned::read(folder).map(ViewUpdate::Planned).into_iter().collect();
    let of = if trainable < params { format!("{trainable} of ") } else { String::new() };
    news.push(ViewUpdate::Note(format!("training {of}{params} parameters on {device}")));
    if *resumed_from > 0 {
        news.push(ViewUpdate::Note(format!("resumed after step {resumed_from}")));
    }
    if *filtered > 0 {
        news.push(ViewUpdate::Warning(format!(
            "{filtered} training prompts are longer than rollout.prompt_length and are skipped"
        )));
    }
    if *validation == 0 {
        news.push(ViewUpdate::Note("there are no validation prompts".into()));
    }
    news
}

fn replanned(event: &Event<'_>, folder: &Path) -> Vec<ViewUpdate> {
    let Event::Replanned { phase, step, settings, .. } = event else {
        return Vec::new();
    };
    let said =
        ViewUpdate::Warning(format!("out of memory in {phase} of step {step}; continues with {}", settings.join(" ")));
    let plan = Planned::read(folder).map(ViewUpdate::Planned);
    [Some(said), plan].into_iter().flatten().collect()
}

fn saved(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy());
    format!("saved {}", name.unwrap_or_else(|| path.display().to_string().into()))
}

/// Most bytes of each phase: its peak where one is known, else what it held at its end.
fn most(readings: &[LedgerEntry]) -> BTreeMap<String, u64> {
    let mut phases = BTreeMap::new();
    for entry in readings {
        let bytes = entry.reading.peak_bytes;
        let bytes = bytes.unwrap_or(entry.reading.in_use_bytes);
        let most = phases.entry(entry.phase.name().to_owned()).or_insert(0);
        *most = bytes.max(*most);
    }
    phases
}

/// Those samples of a step that are shown.
fn samples(step: u64, report: &RolloutReport) -> Vec<(Pick, Excerpt)> {
    let rows = report.rollouts.iter();
    let rows: Vec<(u64, f64)> = rows.map(|r| (r.prompt_index, r.reward.unwrap_or(f64::NAN))).collect();
    let picked = picks(&rows).into_iter();
    picked
        .filter_map(|(at, pick)| {
            let rollout = &report.rollouts[at];
            let prompt = rollout.prompt_index.checked_sub(report.first_prompt)?;
            let prompt = report.prompts.get(prompt as usize)?;
            let number = |value: f64| Some(value).filter(|value| value.is_finite());
            let parts = rollout.reward_parts.iter();
            let finish = if rollout.finish == FinishReason::Length { TRUNCATED } else { "stop" };
            let excerpt = Excerpt {
                step,
                draw: rollout.prompt_index,
                prompt: prompt.text.clone(),
                completion: rollout.text.clone(),
                answer: prompt.example.answer.clone(),
                reward: rollout.reward.and_then(number),
                reward_parts: parts.map(|(name, value)| (name.clone(), number(*value))).collect(),
                advantage: number(rollout.mean_advantage()),
                finish: finish.to_owned(),
                tokens: rollout.completion.len() as u64,
            };
            Some((pick, excerpt))
        })
        .collect()
}
