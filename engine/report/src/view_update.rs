//! Updates of a view of a run, from the run's events or its folder.

use super::excerpt::{Excerpt, Pick, TRUNCATED, picks};
use super::folder::name;
use firebrick_engine::config::{Mode, RunConfig};
use firebrick_engine::metrics::{Event, GLOBAL_STEP, LedgerEntry, Metrics, RolloutReport};
use firebrick_engine::plan::PlanReport;
use firebrick_engine::plan::estimate::EstimatePhase;
use firebrick_engine::task::TaskConfig;
use firebrick_sampler::FinishReason;
use firebrick_spec::file;
use std::collections::BTreeMap;
use std::path::Path;

/// An update of a view.
#[derive(Clone, Debug, PartialEq)]
pub enum ViewUpdate {
    /// A run starts or resumes; earlier updates no longer apply.
    Opened {
        /// The run folder's name.
        name: String,
        /// Kind of training.
        mode: Mode,
        /// Its task, for reading answers.
        task: Option<TaskConfig>,
        /// Steps of the whole run, if known.
        steps: Option<u64>,
    },
    /// The plan in force.
    Planned(Planned),
    /// The running phase.
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
        /// Steps of the whole run, if known.
        steps: Option<u64>,
        /// Values by name; without those that are not finite.
        metrics: Metrics,
    },
    /// Samples of the newest step, the newest first.
    Samples {
        /// The step.
        step: u64,
        /// Each with the reason for showing it.
        samples: Vec<(Pick, Excerpt)>,
    },
    /// Readings at the ends of phases.
    Memory(Vec<LedgerEntry>),
    /// An informational message.
    Note(String),
    /// A warning or an error.
    Warning(String),
    /// The run has ended.
    Ended {
        /// Finished steps.
        steps: u64,
    },
}

/// Predictions of a plan that a view shows.
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
    /// Reads a run folder's `plan.json`; `None` if it cannot be read.
    pub fn read(folder: &Path) -> Option<Self> {
        let text = file::read(&folder.join("plan.json"), file::MAX_CONFIG_BYTES).ok()?;
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
    /// The start of a run in a folder. A configuration of another version is `None`: then steps and
    /// answers are unknown.
    pub fn opened(folder: &Path, mode: Mode, config: Option<&RunConfig>) -> Self {
        let steps = |config: &RunConfig| match mode {
            Mode::Rl => Some(config.trainer.steps),
            Mode::Sft => config.sft.as_ref()?.steps,
        };
        let task = config.and_then(|config| config.task.clone());
        Self::Opened { name: name(folder), mode, task, steps: config.and_then(steps) }
    }

    /// Updates of an event. The plan is read from the run folder.
    pub fn of_event(event: &Event<'_>, mode: Mode, folder: &Path) -> Vec<Self> {
        let planned = || Planned::read(folder).map(Self::Planned).into_iter();
        match event {
            Event::Ready { device, params, trainable, resumed_from, filtered, validation, .. } => {
                let part = if trainable < params { format!("{trainable} of ") } else { String::new() };
                let messages = [
                    Some(Self::Note(format!("training {part}{params} parameters on {device}"))),
                    (*resumed_from > 0).then(|| Self::Note(format!("resumed after step {resumed_from}"))),
                    (*filtered > 0).then(|| {
                        Self::Warning(format!(
                            "{filtered} training prompts are longer than rollout.prompt_length and are skipped"
                        ))
                    }),
                    (*validation == 0).then(|| Self::Note("there are no validation prompts".into())),
                ];
                planned().chain(messages.into_iter().flatten()).collect()
            }
            Event::Phase { step, phase } => vec![Self::Phase { step: *step, phase: phase.name() }],
            Event::Replanned { phase, step, settings, .. } => {
                let settings = settings.join(" ");
                let warning = format!("out of memory in {phase} of step {step}; continues with {settings}");
                [Self::Warning(warning)].into_iter().chain(planned()).collect()
            }
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
                let memory = memory.map(|memory| Self::Memory(memory.readings.clone()));
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

fn saved(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy());
    format!("saved {}", name.unwrap_or_else(|| path.display().to_string().into()))
}

/// The shown samples of a step.
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
                sample: rollout.sample as u64,
                prompt: prompt.text.clone(),
                completion: rollout.text.clone(),
                answer: prompt.example.answer.clone(),
                reward: rollout.reward.and_then(number),
                reward_parts: parts.map(|(name, value)| (name.clone(), number(*value))).collect(),
                readings: Vec::new(),
                advantage: number(rollout.mean_advantage()),
                finish: finish.to_owned(),
                tokens: rollout.completion.len() as u64,
            };
            Some((pick, excerpt))
        })
        .collect()
}
