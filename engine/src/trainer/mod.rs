//! The trainer: a run from its first step to its last.

mod critic;
mod greedy;
mod recover;
mod report;
mod resume;
mod rl;
mod rollout;
mod same_run;
mod setup;
mod sft;
mod update;
mod validate;

pub use report::{Event, Metrics, Observer, PhaseMemory, Silent, Summary};
pub use setup::Start;

use crate::config::RunConfig;
use crate::critic::CriticSource;
use crate::dataset::Dataset;
use crate::demonstrations::Demonstrations;
use crate::judge::Judge;
use crate::learner::Learner;
use crate::ledger::Ledger;
use crate::objective::Objective;
use crate::placed::{Placed, Use};
use crate::plan::estimate::Estimate;
use crate::plan::planner::{Failure, Request};
use crate::plan::{Plan, PlanReport, Role};
use crate::run_dir::RunDir;
use crate::source::Source;
use crate::trainer_state::{self, Mode, TrainerState};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::device::panic_message;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_backends::profile::DeviceProfile;
use firebrick_backends::trace::span_on;
use firebrick_models::Decoder;
use firebrick_models::checkpoint::{ExportOptions, StoredDtype};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
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
    source: Source,
    data: Dataset,
    /// Examples of supervised training, where there is or was to come any.
    demonstrations: Option<Arc<Demonstrations>>,
    learner: Learner,
    reference: Option<Placed>,
    /// What says how much a state is worth, where the objective has a critic, and where its weights come from.
    critic: Option<Learner>,
    critic_source: Option<CriticSource>,
    /// The task's reward models.
    judge: Judge,
    /// What the planner was asked, and the plan in force.
    request: Request,
    plan: Plan,
    /// Plans taken because one before ran out of memory.
    replans: u64,
    /// What the phase at hand uses.
    uses: Vec<(Role, Use)>,
    objective: Arc<dyn Objective>,
    run: RunDir,
    state: TrainerState,
    ledger: Ledger,
    observer: Box<dyn Observer>,
    resumed: bool,
    /// Optimizer steps skipped in a row, by phase.
    skipped_in_a_row: BTreeMap<&'static str, u64>,
    /// The step that phases belong to: 0 before the first.
    phase_step: u64,
}

impl Trainer {
    /// Runs to the end: what the mode asks for, checkpoints and validations on the way, a summary at the end.
    pub fn run(&mut self) -> Result<Summary> {
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
        match self.state.mode {
            Mode::Rl => self.train()?,
            Mode::Sft => self.sft()?,
        }
        let summary = self.summary();
        self.run.write_json("summary.json", &summary)?;
        self.observer.event(Event::Finished(&summary));
        Ok(summary)
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

    /// Runs one phase: brings the models to where it needs them, times it, reads memory at its end, and turns a backend's
    /// panic into an error that names it.
    fn phase<T>(
        &mut self,
        name: &'static str,
        uses: &[(Role, Use)],
        metrics: &mut Metrics,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.clean_up();
        self.ledger.begin();
        let started = Instant::now();
        let step = self.phase_step;
        self.uses = uses.to_vec();
        let span = span_on(name, &self.device);
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.settle_again()?;
            work(self)
        }));
        drop(span);
        *metrics.entry(format!("timing_s/{name}")).or_default() += started.elapsed().as_secs_f64();
        self.ledger.end(step, name, &self.device);
        let failed = |detail| Error::Phase {
            phase: name,
            step,
            detail,
        };
        match result {
            Ok(Err(Error::Model(firebrick_models::Error::Device { doing, detail }))) => {
                Err(failed(format!("{doing}: {detail}")))
            }
            Ok(Err(Error::Device(firebrick_backends::Error::Transfer(detail)))) => {
                Err(failed(detail))
            }
            Ok(result) => result,
            Err(panic) => Err(failed(panic_message(panic.as_ref()))),
        }
    }

    /// Gives the pools' free pages back where a setting says so. Pools that keep pages for another phase's shapes cost
    /// reserved bytes; giving them back costs the time of allocating again.
    fn clean_up(&self) {
        let every = self.config.memory.cleanup_every;
        if every > 0 && self.phase_step.is_multiple_of(every) {
            self.device.memory_cleanup();
        }
    }

    /// Brings every model to where it is needed: first away, then here.
    fn settle_again(&mut self) -> Result<()> {
        let uses = self.uses.clone();
        let used = |role| uses.iter().find(|(r, _)| *r == role).map(|(_, now)| *now);
        let critic = self.critic.as_mut().map(|critic| &mut critic.model);
        let policy = Some(&mut self.learner.model);
        let mut models: Vec<(&mut Placed, Use)> = [policy, self.reference.as_mut(), critic]
            .into_iter()
            .flatten()
            .map(|model| {
                let now = used(model.role()).unwrap_or(Use::Idle);
                (model, now)
            })
            .collect();
        models.sort_by_key(|(_, now)| *now != Use::Idle);
        models
            .into_iter()
            .try_for_each(|(model, now)| model.settle(now))
    }

    /// Closes a step: appends its metrics and memory readings, and everything that has a rhythm.
    fn finish_step(&mut self, mut metrics: Metrics, started: Instant) -> Result<Metrics> {
        let seconds = started.elapsed().as_secs_f64();
        self.state.step += 1;
        self.state.seconds += seconds;
        self.state.peak_bytes = self.ledger.peak_bytes();
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
            |f: fn(&crate::ledger::LedgerEntry) -> u64| memory.iter().map(f).max().unwrap_or(0);
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
        Ok(metrics)
    }

    /// Validates and saves if this step's number asks for it.
    fn rhythm(&mut self, metrics: &mut Metrics, steps: u64) -> Result<()> {
        let step = self.state.step;
        let due = |freq: u64| step == steps || (freq > 0 && step.is_multiple_of(freq));
        if due(self.config.trainer.test_freq) {
            metrics.extend(self.validate()?);
            self.flush_memory()?;
        }
        self.log(metrics)?;
        // a negative one: never
        if u64::try_from(self.config.trainer.save_freq).is_ok_and(due) {
            self.save()?;
        }
        Ok(())
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

    fn save(&mut self) -> Result<()> {
        let (decoder, source) = (self.learner.decoder(), &self.source);
        // an f32 folder of an f32 model is its own master copy, and so is an adapter
        let masters = decoder.specs().any(|spec| {
            let stored = source.checkpoint.stored_dtype(&spec.name);
            spec.trainable && (decoder.arch().precision.is_half() || stored != StoredDtype::F32)
        });
        let path = self
            .run
            .publish(&RunDir::checkpoint_name(self.state.step), |dir| {
                source.save(decoder, &self.config, dir)?;
                trainer_state::save(
                    &dir.join("trainer"),
                    &self.state,
                    &self.learner.optimizer,
                    decoder,
                    masters,
                )?;
                self.save_critic(&dir.join("trainer"))
            })?;
        self.run.prune(self.config.trainer.max_ckpt_to_keep)?;
        self.observer.event(Event::Saved { path });
        Ok(())
    }

    /// Writes the critic and its moments beside the policy's.
    fn save_critic(&self, trainer: &Path) -> Result<()> {
        let (Some(critic), Some(source)) = (&self.critic, &self.critic_source) else {
            return Ok(());
        };
        let dir = trainer.join(CRITIC);
        let options = ExportOptions {
            max_shard_bytes: self.config.trainer.max_shard_bytes,
        };
        source.save(critic.decoder(), &dir, options)?;
        if critic.decoder().arch().precision.is_half() {
            trainer_state::save_masters(&dir, &critic.optimizer, critic.decoder())?;
        }
        trainer_state::save_optimizer(&dir, &critic.optimizer, critic.decoder())
    }

    /// Predicted beside measured bytes, by phase of the estimate.
    fn phase_memory(&self, predicted: &Estimate) -> Vec<PhaseMemory> {
        let measured = |names: &[&str]| {
            let phases = self.ledger.phases();
            names.iter().filter_map(|n| phases.get(n)).max().copied()
        };
        let of = |names: &[&str]| {
            let totals = predicted.phases.iter();
            let own = totals.filter(|p| names.contains(&p.name.as_str()));
            own.map(|p| p.total_bytes).max().unwrap_or(0)
        };
        [
            (
                "rollout",
                of(&["rollout"]),
                measured(&["gen", "gen_max", "testing"]),
            ),
            ("score", of(&["score"]), measured(&["old_log_prob", "ref"])),
            (
                "update",
                of(&["backward", "optimizer"]),
                measured(&["update_actor"]),
            ),
            ("values", of(&["values"]), measured(&["values"])),
            (
                "update_critic",
                of(&["critic_backward", "critic_optimizer"]),
                measured(&["update_critic"]),
            ),
        ]
        .into_iter()
        .filter_map(|(phase, predicted_bytes, measured)| {
            Some(PhaseMemory {
                phase,
                predicted_bytes,
                measured_bytes: measured?,
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
