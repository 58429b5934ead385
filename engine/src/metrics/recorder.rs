//! Destinations of reports: files of the run folder, observer and trackers.

use super::described::{GLOBAL_STEP, Metrics};
use super::events::{Control, Event, Observer};
use super::ledger::LedgerEntry;
use super::names::{metrics, timings, validation_metrics};
use super::report::{RolloutReport, StepMemory, StepReport, ValidationReport};
use super::summary::Summary;
use super::timeline::MemoryTimeline;
use super::token_log::{TokenLog, TokenSettings};
use super::tracker::Trackers;
use super::warnings::Warnings;
use crate::Result;
use crate::checkpoint::RunDir;
use crate::checkpoint::trainer_state::BestValidation;
use crate::config::Mode;
use crate::plan::planner::{Failure, Request};
use crate::plan::{self, Plan, PlanReport};
use crate::rollout::SampleRecord;
use firebrick_models::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const METRICS: &str = "metrics.jsonl";
const SAMPLES: &str = "samples.jsonl";
const MEMORY: &str = "memory.jsonl";
const SUMMARY: &str = "summary.json";
const PLAN: &str = "plan.json";
const NEXT_PLAN: &str = "next_plan.json";
const BEST: &str = "best.json";

/// Writes `metrics.jsonl`, `samples.jsonl`, `tokens.jsonl`, `memory.jsonl`, `memory_timeline.json`, `summary.json` and
/// the plans of a run, and reports to its observer and its trackers.
pub struct Recorder {
    pub(crate) run: RunDir,
    /// Log of some groups with their tokens.
    tokens: Option<TokenLog>,
    observer: Box<dyn Observer>,
    trackers: Trackers,
    /// The incomplete line of `metrics.jsonl`: a step and its validation share one.
    line: Metrics,
    warnings: Warnings,
    /// True once it has warned that a timeline could not be written.
    timeline_failed: bool,
}

impl Recorder {
    /// A recorder of the run in a folder.
    pub fn new(run: RunDir, observer: Box<dyn Observer>, trackers: Trackers) -> Self {
        // a file that cannot be read fails at the next line
        let lines = std::fs::read_to_string(run.path().join(METRICS)).unwrap_or_default();
        let warnings = Warnings::after(&lines);
        Self { run, tokens: None, observer, trackers, line: Metrics::new(), warnings, timeline_failed: false }
    }

    /// Logs some groups of every step with their tokens.
    ///
    /// # Errors
    /// `Error::Io` if the file cannot be read or created.
    pub fn with_token_log(mut self, settings: TokenSettings, tokenizer: &Arc<Tokenizer>) -> Result<Self> {
        let log = (settings.groups > 0).then(|| TokenLog::open(&self.run, settings, Arc::clone(tokenizer)));
        self.tokens = log.transpose()?;
        Ok(self)
    }

    /// Removes later steps from the files of a run that continues after `step`, or all steps of one that starts over.
    ///
    /// # Errors
    /// `Error::Io` if a file cannot be read, written again or removed.
    pub fn rewind(run: &RunDir, step: Option<u64>) -> Result<()> {
        for (file, key) in [(METRICS, GLOBAL_STEP), (SAMPLES, "step"), (MEMORY, "step"), (TokenLog::FILE, "step")] {
            match step {
                Some(step) => run.rewind(file, key, step)?,
                None => run.remove(file)?,
            }
        }
        // a run that continues keeps its timeline
        if step.is_none() { run.remove(MemoryTimeline::FILE) } else { Ok(()) }
    }

    /// Writes the memory timeline. If that fails, the run continues with a warning.
    pub fn timeline(&mut self, timeline: &MemoryTimeline) {
        let text = timeline.to_json();
        let written = text.and_then(|text| self.run.write(MemoryTimeline::FILE, text.as_bytes()));
        if let Err(error) = written
            && !self.timeline_failed
        {
            self.timeline_failed = true;
            tracing::warn!("the memory timeline is missing, the run continues: {error}");
        }
    }

    /// Polls the observer.
    pub fn control(&mut self) -> Control {
        self.observer.control()
    }

    /// Sends an event to the observer.
    pub fn event(&mut self, event: Event<'_>) {
        self.observer.event(event);
    }

    /// Records a step of `steps`: its samples, memory, and metrics in the line of [`end_line`](Self::end_line).
    ///
    /// # Errors
    /// `Error::Io` if a file of the run folder cannot be written; `Error::Model` for tokens that cannot be decoded.
    /// Failed trackers are no error.
    pub fn step(&mut self, report: &StepReport, steps: u64, mode: Mode) -> Result<()> {
        if let Some(rollout) = &report.rollout {
            self.run.append(SAMPLES, &samples(report.step, rollout))?;
            if let Some(tokens) = &mut self.tokens {
                tokens.step(&self.run, report.step, rollout)?;
            }
            self.trackers.samples(report.step, steps, rollout);
        }
        if let Some(memory) = &report.memory {
            self.memory(memory)?;
        }
        let (step, values) = (report.step, metrics(report));
        self.observer.event(match mode {
            Mode::Rl => Event::Step { step, steps, metrics: &values, report },
            Mode::Sft => Event::Sft { step, steps, metrics: &values },
        });
        for warning in self.warnings.check(step, &values) {
            tracing::warn!("{warning}");
        }
        self.line.extend(values);
        Ok(())
    }

    /// Reports a step of the warm-up to the observer. The run folder has no metrics of it.
    pub fn warm_up_step(&mut self, report: &StepReport, steps: u64) {
        self.observer.event(Event::Sft { step: report.step, steps, metrics: &metrics(report) });
    }

    /// Records a validation: its memory readings, and its metrics and times in the line of
    /// [`end_line`](Self::end_line). Returns the metrics.
    ///
    /// # Errors
    /// `Error::Io` if `memory.jsonl` cannot be written.
    pub fn validation(&mut self, report: &ValidationReport, readings: &[LedgerEntry]) -> Result<Metrics> {
        let values = validation_metrics(report);
        if !values.is_empty() {
            self.observer.event(Event::Validated { step: report.step, metrics: &values });
        }
        self.line.extend(timings(&report.timings));
        self.line.extend(values.clone());
        self.run.append(MEMORY, readings)?;
        Ok(values)
    }

    /// Writes the line of a step into `metrics.jsonl`, and sends it to the trackers.
    ///
    /// # Errors
    /// `Error::Io` if `metrics.jsonl` cannot be written. Failed trackers are no error.
    pub fn end_line(&mut self, step: u64) -> Result<()> {
        let mut line = std::mem::take(&mut self.line);
        line.insert(GLOBAL_STEP.into(), step as f64);
        self.trackers.metrics(step, &line);
        // NaN, which JSON lacks, becomes null
        let mut line: Map<String, Value> = line.into_iter().map(|(name, value)| (name, json!(value))).collect();
        line.insert(GLOBAL_STEP.into(), json!(step));
        self.run.append(METRICS, &[line])
    }

    fn memory(&self, memory: &StepMemory) -> Result<()> {
        if let Some(leak) = &memory.leak {
            tracing::warn!(
                "memory grows: {:.0} KiB a step over the last {} steps, most of it in {}; memory.jsonl has the readings",
                leak.bytes_per_step / 1024.0,
                leak.steps,
                leak.category
            );
        }
        self.run.append(MEMORY, &memory.readings)
    }

    /// Writes the current plan and the next cheaper one, for a process that the system kills.
    ///
    /// # Errors
    /// `Error::Io` if a file cannot be written; `Error::Config` and `Error::Plan` of the planner, except if no cheaper
    /// plan is left.
    pub fn plans(&self, request: &Request, plan: &Plan) -> Result<()> {
        self.run.write_json(PLAN, &PlanReport::new(request, request.predict(plan.clone()))?)?;
        match request.next_cheaper(plan, &Failure::default()) {
            Ok(next) => self.run.write_json(NEXT_PLAN, &PlanReport::new(request, next)?),
            Err(plan::Error::Infeasible(_)) => self.run.remove(NEXT_PLAN),
            Err(other) => Err(other.into()),
        }
    }

    /// Writes the best validation, with the checkpoint of its step, or removes the file.
    ///
    /// # Errors
    /// `Error::Io` if `best.json` cannot be written or removed.
    pub fn best(&self, best: Option<&BestValidation>) -> Result<()> {
        let Some(BestValidation { step, metric, value }) = best else { return self.run.remove(BEST) };
        let checkpoint = RunDir::checkpoint_name(*step);
        let best = json!({"checkpoint": checkpoint, "step": step, "metric": metric, "value": value});
        self.run.write_json(BEST, &best)
    }

    /// Writes the summary.
    ///
    /// # Errors
    /// `Error::Io` if `summary.json` cannot be written. Failed trackers are no error.
    pub fn finished(&mut self, summary: &Summary) -> Result<()> {
        self.run.write_json(SUMMARY, summary)?;
        self.trackers.finish();
        self.observer.event(Event::Finished(summary));
        Ok(())
    }
}

/// Rollouts for `samples.jsonl`.
fn samples(step: u64, report: &RolloutReport) -> Vec<SampleRecord<'_>> {
    let mut rollouts: Vec<_> = report.rollouts.iter().chain(&report.left_out).collect();
    rollouts.sort_by_key(|r| (r.prompt_index, r.sample));
    rollouts
        .into_iter()
        .map(|r| {
            let prompt = &report.prompts[(r.prompt_index - report.first_prompt) as usize];
            SampleRecord {
                step,
                prompt_index: r.prompt_index,
                sample: r.sample,
                prompt: r.prompt_text.as_deref().unwrap_or(&prompt.text),
                completion: &r.text,
                turns: &r.turns,
                num_turns: (!r.turns.is_empty()).then(|| r.num_turns()),
                answer: &prompt.example.answer,
                reward: r.reward,
                reward_parts: &r.reward_parts,
                reward_extra: &r.reward_extra,
                reward_error: r.reward_error.as_deref(),
                readings: &r.readings,
                advantage: r.mean_advantage(),
                finish: r.finish,
                tokens: r.completion.len(),
            }
        })
        .collect()
}
