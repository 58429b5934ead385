//! The trainer: a run from its first step to its last.

mod checks;
mod evaluate;
mod greedy;
mod models;
mod phases;
mod recover;
mod report;
mod resume;
mod rl;
mod rollout;
mod save;
mod score;
mod sequences;
mod setup;
mod sft;
mod update;
mod validate;

pub use evaluate::{Evaluation, evaluate};
pub use report::{Event, Metrics, Observer, PhaseMemory, Silent, Summary};
pub use setup::Start;

use crate::checkpoint::trainer_state::TrainerState;
use crate::checkpoint::{CriticSource, PolicySource, RunDir};
use crate::config::{Mode, RunConfig};
use crate::data::{PromptDataset, SftDataset};
use crate::executor::ResidentModel;
use crate::learner::Learner;
use crate::lr_scheduler::LrSchedule;
use crate::metrics::{Ledger, Phase, PhaseTimings};
use crate::objective::Objective;
use crate::plan::estimate::Estimate;
use crate::plan::planner::{Failure, Request};
use crate::plan::{Plan, PlanReport};
use crate::reward::RewardManager;
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_models::Decoder;
use firebrick_spec::DeviceProfile;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Folder of the critic in the trainer's part of a checkpoint.
const CRITIC: &str = "critic";

/// Non-finite optimizer steps in a row that end a run.
const MAX_SKIPPED: u64 = 10;

/// A run: policy, data, optimizer, plan, and where it stands.
pub struct Trainer {
    config: RunConfig,
    info: DeviceInfo,
    device: Device,
    source: PolicySource,
    data: PromptDataset,
    /// Examples of supervised training, where there is or was to come any.
    demonstrations: Option<Arc<SftDataset>>,
    learner: Learner,
    reference: Option<ResidentModel>,
    /// What says how much a state is worth, where the objective has a critic, and where its weights come from.
    critic: Option<Learner>,
    critic_source: Option<CriticSource>,
    /// The task's reward models.
    judge: RewardManager,
    /// What the planner was asked, and the plan in force.
    request: Request,
    plan: Plan,
    /// Plans taken because one before ran out of memory.
    replans: u64,
    objective: Arc<dyn Objective>,
    run: RunDir,
    state: TrainerState,
    ledger: Ledger,
    observer: Box<dyn Observer>,
    /// Steps of the whole run, and the learning rate of each.
    steps: u64,
    lr: LrSchedule,
    critic_lr: Option<LrSchedule>,
    /// Whether all is done that comes before the first step.
    begun: bool,
    /// Seconds of the phases since they were last reported.
    timings: PhaseTimings,
    /// Optimizer steps skipped in a row, by phase.
    skipped_in_a_row: BTreeMap<Phase, u64>,
    /// The step that phases belong to: 0 before the first.
    phase_step: u64,
}

impl Trainer {
    /// Runs to the end: what comes before the first step, the steps with their checkpoints and validations, a summary.
    pub fn run(&mut self) -> Result<Summary> {
        self.announce();
        self.begin()?;
        while self.state.step < self.steps {
            let started = Instant::now();
            self.phase_step = self.state.step + 1;
            let metrics = match self.state.mode {
                Mode::Rl => self.rl_step()?,
                Mode::Sft => self.sft_step()?,
            };
            self.close_step(metrics, started)?;
        }
        let summary = self.summary();
        self.run.write_json("summary.json", &summary)?;
        self.observer.event(Event::Finished(&summary));
        Ok(summary)
    }

    /// Tells the observer what is about to run.
    fn announce(&mut self) {
        let predicted = self.request.judge(self.plan.clone()).estimate;
        self.observer.event(Event::Ready {
            predicted_peak_bytes: predicted.peak_bytes,
            budget_bytes: self.request.budget,
            device: format!("{} ({})", self.info.device, self.info.name),
            params: self.learner.decoder().num_params(),
            trainable: self.learner.decoder().num_trainable(),
            output: self.run.path().to_owned(),
            resumed_from: self.state.step,
            filtered: self.data.filtered + self.demonstrations.as_ref().map_or(0, |d| d.filtered),
            validation: self.data.validation.len(),
        });
    }

    /// What comes before the first step of a run: a warm-up, the models that start from the policy, the first validation.
    fn begin(&mut self) -> Result<()> {
        if self.begun {
            return Ok(());
        }
        if self.state.mode == Mode::Rl {
            if let Some(sft) = self.config.warmup.sft.clone() {
                self.warm_up(&sft)?;
            }
            self.keep_reference()?;
            self.begin_critic()?;
        }
        let mut metrics = self.validate()?;
        self.flush_memory()?;
        metrics.insert("training/global_step".into(), 0.0);
        self.log(&metrics)?;
        self.begun = true;
        Ok(())
    }

    /// The policy as it stands.
    #[must_use]
    pub fn policy(&self) -> &Decoder {
        self.learner.decoder()
    }

    /// How fast and how large the device is, as the planner sees it.
    #[must_use]
    pub fn profile(&self) -> &DeviceProfile {
        &self.request.profile
    }

    /// Ends a step: counts it, writes its metrics and memory readings, tells the observer, and validates and saves where the
    /// step's number asks for it.
    fn close_step(&mut self, mut metrics: Metrics, started: Instant) -> Result<()> {
        let seconds = started.elapsed().as_secs_f64();
        self.state.step += 1;
        self.state.seconds += seconds;
        self.state.peak_bytes = self.ledger.peak_bytes();
        self.state.optimizer_steps = self.learner.optimizer.steps();
        self.state.loss_scale = self.learner.optimizer.scaler();
        if let Some(critic) = &self.critic {
            self.state.critic_steps = critic.optimizer.steps();
            self.state.critic_loss_scale = critic.optimizer.scaler();
        }
        metrics.insert("timing_s/step".into(), seconds);
        metrics.insert("perf/time_per_step".into(), seconds);
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        if let Some(leak) = self.ledger.close_step() {
            tracing::warn!(
                "memory grows: {:.0} KiB a step over the last {} steps, most of it in {}; memory.jsonl has the readings",
                leak.bytes_per_step / 1024.0,
                leak.steps,
                leak.category
            );
        }
        let memory = self.ledger.take();
        let most =
            |f: fn(&crate::metrics::LedgerEntry) -> u64| memory.iter().map(f).max().unwrap_or(0);
        let allocated = most(|e| e.reading.peak_bytes.unwrap_or(e.reading.in_use_bytes));
        let reserved = most(|e| e.reading.peak_bytes.unwrap_or(e.reading.reserved_bytes));
        metrics.insert("perf/max_memory_allocated_gb".into(), gib(allocated));
        metrics.insert("perf/max_memory_reserved_gb".into(), gib(reserved));
        metrics.insert(
            "perf/cpu_memory_used_gb".into(),
            gib(peak_resident_bytes().unwrap_or(0)),
        );
        metrics.insert("training/global_step".into(), self.state.step as f64);
        self.run.append("memory.jsonl", &memory)?;
        let (step, steps) = (self.state.step, self.steps);
        let metrics_so_far = &metrics;
        self.observer.event(match self.state.mode {
            Mode::Rl => Event::Step {
                step,
                steps,
                metrics: metrics_so_far,
            },
            Mode::Sft => Event::Sft {
                step,
                steps,
                metrics: metrics_so_far,
            },
        });
        let due = |freq: u64| step == steps || (freq > 0 && step.is_multiple_of(freq));
        if due(self.config.trainer.test_freq) {
            metrics.extend(self.validate()?);
            self.flush_memory()?;
        }
        self.log(&metrics)?;
        // a negative one: never
        if u64::try_from(self.config.trainer.save_freq).is_ok_and(due) {
            let path = self.save()?;
            self.observer.event(Event::Saved { path });
        }
        Ok(())
    }

    /// Seconds of the phases since the last call, as metrics.
    fn take_timings(&mut self) -> Metrics {
        let timings = std::mem::take(&mut self.timings);
        let named = timings
            .iter()
            .map(|(phase, seconds)| (format!("timing_s/{phase}"), seconds));
        named.collect()
    }

    /// Writes memory readings that no step reports.
    fn flush_memory(&mut self) -> Result<()> {
        let entries = self.ledger.take();
        self.run.append("memory.jsonl", &entries)
    }

    fn log(&self, metrics: &Metrics) -> Result<()> {
        let line: serde_json::Map<String, Value> = metrics
            .iter()
            .map(|(name, &value)| {
                // a step number is a whole number, and JSON has no NaN
                let value = if name == "training/global_step" {
                    json!(value as u64)
                } else {
                    json!(value)
                };
                (name.clone(), value)
            })
            .collect();
        self.run.append("metrics.jsonl", &[line])
    }

    /// Predicted beside measured bytes, by phase of the estimate.
    fn phase_memory(&self, predicted: &Estimate) -> Vec<PhaseMemory> {
        let measured = |of: &[Phase]| {
            let phases = self.ledger.phases();
            of.iter().filter_map(|phase| phases.get(phase)).max()
        };
        let of = |names: &[&str]| {
            let totals = predicted.phases.iter();
            let own = totals.filter(|p| names.contains(&p.name.as_str()));
            own.map(|p| p.total_bytes).max().unwrap_or(0)
        };
        let sampling = [Phase::Generate, Phase::GenerateBaseline, Phase::Validation];
        let scoring = [Phase::OldLogProbs, Phase::ReferenceLogProbs];
        let backward = ["critic_backward", "critic_optimizer"];
        [
            ("rollout", of(&["rollout"]), measured(&sampling)),
            ("score", of(&["score"]), measured(&scoring)),
            (
                "update",
                of(&["backward", "optimizer"]),
                measured(&[Phase::UpdateActor]),
            ),
            ("values", of(&["values"]), measured(&[Phase::Values])),
            (
                "update_critic",
                of(&backward),
                measured(&[Phase::UpdateCritic]),
            ),
        ]
        .into_iter()
        .filter_map(|(phase, predicted_bytes, measured)| {
            Some(PhaseMemory {
                phase,
                predicted_bytes,
                measured_bytes: *measured?,
            })
        })
        .collect()
    }

    /// The plan in force and the one to try should it run out of memory, into the run folder: a process that the system
    /// ends has no more time to think about it.
    fn write_plans(&self) -> Result<()> {
        let fit = self.request.judge(self.plan.clone());
        let report = PlanReport::new(&self.request, fit)?;
        self.run.write_json("plan.json", &report)?;
        match self.request.next_cheaper(&self.plan, &Failure::default()) {
            Ok(next) => {
                let report = PlanReport::new(&self.request, next)?;
                self.run.write_json("next_plan.json", &report)
            }
            Err(Error::NothingFits(_)) => self.run.remove("next_plan.json"),
            Err(other) => Err(other),
        }
    }

    fn summary(&mut self) -> Summary {
        let predicted = self.request.judge(self.plan.clone()).estimate;
        let measured_peak_bytes = self.ledger.peak_bytes();
        Summary {
            steps: self.state.step,
            seconds: self.state.seconds,
            tokens_per_second: self.state.tokens as f64 / self.state.seconds.max(1e-9),
            first: self.state.first_validation.clone(),
            last: self.state.last_validation.clone(),
            predicted_peak_bytes: Some(predicted.peak_bytes),
            measured_peak_bytes,
            memory: self.phase_memory(&predicted),
            replans: self.replans,
            peak_resident_bytes: peak_resident_bytes(),
            device: self.info.device.to_string(),
            precision: self.config.precision.name(),
            skipped_steps: self.state.skipped_steps,
        }
    }
}
