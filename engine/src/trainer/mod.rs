//! The trainer: a run from its first step to its last.

mod report;
mod rl;
mod setup;
mod sft;
mod update;
mod validate;

pub use report::{Event, Metrics, Observer, Silent, Summary};
pub use setup::Start;

use crate::batch::Cut;
use crate::config::RunConfig;
use crate::dataset::Dataset;
use crate::ledger::Ledger;
use crate::objective::Objective;
use crate::optim::AdamW;
use crate::plan::ModelPlan;
use crate::run_dir::RunDir;
use crate::source::Source;
use crate::trainer_state::{self, Mode, TrainerState};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::DeviceInfo;
use firebrick_backends::device::panic_message;
use firebrick_backends::memory::peak_resident_bytes;
use firebrick_models::Decoder;
use firebrick_models::checkpoint::{ExportOptions, StoredDtype, export};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Non-finite optimizer steps in a row that end a run.
const MAX_SKIPPED: u64 = 10;

/// A run: policy, data, optimizer, plan, and where it stands.
pub struct Trainer {
    config: RunConfig,
    info: DeviceInfo,
    device: Device,
    source: Source,
    data: Dataset,
    decoder: Decoder,
    reference: Option<Decoder>,
    objective: Box<dyn Objective>,
    optimizer: AdamW,
    plan: ModelPlan,
    run: RunDir,
    state: TrainerState,
    ledger: Ledger,
    observer: Box<dyn Observer>,
    resumed: bool,
    skipped_in_a_row: u64,
    /// The step that phases belong to: 0 before the first.
    phase_step: u64,
}

impl Trainer {
    /// Runs to the end: what the mode asks for, checkpoints and validations on the way, a summary at the end.
    pub fn run(&mut self) -> Result<Summary> {
        self.observer.event(Event::Ready {
            device: format!("{} ({})", self.info.device, self.info.name),
            params: self.decoder.num_params(),
            output: self.run.path().to_owned(),
            resumed_from: self.state.step,
            filtered: self.data.filtered,
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
        &self.decoder
    }

    /// Runs one phase: times it, reads memory at its end, and turns a backend's panic into an error that names it.
    fn phase<T>(
        &mut self,
        name: &'static str,
        metrics: &mut Metrics,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        self.ledger.begin();
        let started = Instant::now();
        let step = self.phase_step;
        let result = catch_unwind(AssertUnwindSafe(|| work(self)));
        *metrics.entry(format!("timing_s/{name}")).or_default() += started.elapsed().as_secs_f64();
        self.ledger.end(step, name, &self.device);
        match result {
            Ok(Err(Error::Model(firebrick_models::Error::Device { doing, detail }))) => {
                Err(Error::Phase {
                    phase: name,
                    step,
                    detail: format!("{doing}: {detail}"),
                })
            }
            Ok(result) => result,
            Err(panic) => Err(Error::Phase {
                phase: name,
                step,
                detail: panic_message(panic.as_ref()),
            }),
        }
    }

    fn train_cut(&self) -> Cut {
        Cut {
            max_tokens: self.plan.train_tokens,
            max_sequences: self.config.memory.micro_batch_size,
            key: "memory.train_tokens",
        }
    }

    fn score_cut(&self) -> Cut {
        Cut {
            max_tokens: self.plan.score_tokens,
            max_sequences: self.config.memory.micro_batch_size,
            key: "memory.score_tokens",
        }
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
        if due(self.config.trainer.save_freq) {
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
        let options = ExportOptions {
            max_shard_bytes: self.config.trainer.max_shard_bytes,
        };
        let (decoder, source) = (&self.decoder, &self.source);
        // an f32 folder is its own master copy
        let masters = decoder
            .specs()
            .any(|spec| source.checkpoint.stored_dtype(&spec.name) != StoredDtype::F32);
        let path = self
            .run
            .publish(&RunDir::checkpoint_name(self.state.step), |dir| {
                let model = dir.join("model");
                std::fs::create_dir_all(&model).map_err(Error::io("create", &model))?;
                export(
                    decoder,
                    &source.checkpoint,
                    Some(&source.tokenizer),
                    &model,
                    options,
                )?;
                trainer_state::save(
                    &dir.join("trainer"),
                    &self.state,
                    &self.optimizer,
                    decoder,
                    masters,
                )
            })?;
        self.run.prune(self.config.trainer.max_ckpt_to_keep)?;
        self.observer.event(Event::Saved { path });
        Ok(())
    }

    fn summary(&mut self) -> Summary {
        Summary {
            steps: self.state.step,
            seconds: self.state.seconds,
            tokens_per_second: self.state.tokens as f64 / self.state.seconds.max(1e-9),
            first: self.state.first_validation.clone(),
            last: self.state.last_validation.clone(),
            predicted_peak_bytes: None,
            measured_peak_bytes: self.ledger.peak_bytes(),
            peak_resident_bytes: peak_resident_bytes(),
            device: self.info.device.to_string(),
            precision: "f32",
            skipped_steps: self.state.skipped_steps,
        }
    }
}
