//! Everything a run needs before its first step: device, tokenizer, model, data, run folder; fresh or resumed.

use super::{Observer, Trainer};
use crate::config::{ObjectiveConfig, RunConfig, SftConfig};
use crate::dataset::Dataset;
use crate::ledger::Ledger;
use crate::objective::Objective;
use crate::optim::{AdamW, OptimConfig};
use crate::run_dir::RunDir;
use crate::source::Source;
use crate::task::Task;
use crate::trainer_state::{self, Mode, TrainerState};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::device;
use firebrick_models::{Checkpoint, Decoder};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Folder of the reference policy in the run folder.
const REFERENCE: &str = "reference";

fn objective(config: &ObjectiveConfig) -> Box<dyn Objective> {
    match config {
        ObjectiveConfig::Grpo(grpo) => Box::new(grpo.clone()),
    }
}

/// Which run: a new one, or the one in the output folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// A new run folder.
    Fresh,
    /// The newest complete checkpoint of the output folder.
    Resume,
}

impl Trainer {
    /// A run with the configured task.
    pub fn new(
        config: RunConfig,
        mode: Mode,
        start: Start,
        observer: Box<dyn Observer>,
    ) -> Result<Self> {
        let Some(task) = &config.task else {
            return Err(Error::Config(
                "`task` is missing; give its `kind` (arithmetic or jsonl)".into(),
            ));
        };
        let task = task.build(Path::new("."))?;
        Self::with_task(config, Arc::from(task), mode, start, observer)
    }

    /// A run with a task of one's own.
    pub fn with_task(
        config: RunConfig,
        task: Arc<dyn Task>,
        mode: Mode,
        start: Start,
        observer: Box<dyn Observer>,
    ) -> Result<Self> {
        config.check()?;
        let source = Source::open(&config.model, task.as_ref())?;
        let arch = source.checkpoint.arch().clone();
        source.check_lengths(&config)?;
        let plan = config.memory.plan(&arch)?;
        let sft = sft_config(&config, mode)?;
        check_schedules(&config, sft.as_ref())?;
        let (device, info) = device::open(config.device)?;
        let max_validation = config.trainer.val_max_samples;
        let data = Dataset::new(
            task,
            source.tokenizer.clone(),
            config.rollout.prompt_length,
            max_validation,
        )?;
        let optim = match (&sft, mode) {
            (Some(sft), Mode::Sft) => sft.optim.clone(),
            _ => config.optim.clone(),
        };
        let objective = objective(&config.objective);
        let (run, decoder, state, optimizer, resumed) = match start {
            Start::Fresh => {
                RunDir::check_free(&config.output)?;
                // the folder is made last, so that a run that cannot start leaves nothing in its own way
                let (decoder, state, optimizer) = fresh(&config, &source, &optim, mode, &device)?;
                let run = RunDir::create(&config.output, &config.to_yaml()?)?;
                (run, decoder, state, optimizer, false)
            }
            Start::Resume => {
                let (run, newest) = resume(&config, mode)?;
                let (decoder, state, optimizer) = match &newest {
                    Some(dir) => restored(dir, &optim, &device)?,
                    None => fresh(&config, &source, &optim, mode, &device)?,
                };
                (run, decoder, state, optimizer, newest.is_some())
            }
        };
        let reference_dir = run.path().join(REFERENCE);
        let reference = match (mode == Mode::Rl && objective.needs_reference(), resumed) {
            (false, _) => None,
            (true, true) => Some(Checkpoint::open(&reference_dir)?.load(&device)?),
            (true, false) => Some(decoder.clone()),
        };
        run.write_json(
            "plan.json",
            &json!({"models": {"policy": plan}, "predicted": Value::Null}),
        )?;
        Ok(Self {
            ledger: Ledger::new(state.peak_bytes, &device),
            config,
            info,
            device,
            source,
            data,
            decoder,
            reference,
            objective,
            optimizer,
            plan,
            run,
            state,
            observer,
            resumed,
            skipped_in_a_row: 0,
            phase_step: 0,
        })
    }

    /// Keeps the reference policy with the run, in full precision, so that a resumed run compares with the same one.
    pub(super) fn keep_reference(&mut self) -> Result<()> {
        if self.reference.is_none() {
            return Ok(());
        }
        self.reference = Some(self.decoder.clone());
        let (decoder, tokenizer) = (&self.decoder, &self.source.tokenizer);
        let source = self.source.checkpoint.clone().stored_as_f32();
        self.run.publish(REFERENCE, |dir| {
            let options = firebrick_models::checkpoint::ExportOptions::default();
            Ok(firebrick_models::checkpoint::export(
                decoder,
                &source,
                Some(tokenizer),
                dir,
                options,
            )?)
        })?;
        Ok(())
    }
}

fn sft_config(config: &RunConfig, mode: Mode) -> Result<Option<SftConfig>> {
    match mode {
        Mode::Rl => Ok(config.warmup.sft.clone()),
        Mode::Sft => config
            .sft
            .clone()
            .or_else(|| config.warmup.sft.clone())
            .map(Some)
            .ok_or_else(|| {
                Error::Config(
                    "`sft` is missing: firebrick sft reads steps, batch_size and optim from it"
                        .into(),
                )
            }),
    }
}

fn check_schedules(config: &RunConfig, sft: Option<&SftConfig>) -> Result<()> {
    config
        .optim
        .lr_scheduler
        .build(config.optim.lr, config.trainer.steps)?;
    if let Some(sft) = sft {
        sft.optim.lr_scheduler.build(sft.optim.lr, sft.steps)?;
    }
    Ok(())
}

fn fresh(
    config: &RunConfig,
    source: &Source,
    optim: &OptimConfig,
    mode: Mode,
    device: &Device,
) -> Result<(Decoder, TrainerState, AdamW)> {
    let decoder = source.decoder(config, device)?;
    let params = decoder.specs().count();
    Ok((
        decoder,
        TrainerState::new(mode),
        AdamW::new(optim.clone(), params),
    ))
}

fn restored(
    dir: &Path,
    optim: &OptimConfig,
    device: &Device,
) -> Result<(Decoder, TrainerState, AdamW)> {
    let mut decoder = Checkpoint::open(&dir.join("model"))?.load(device)?;
    let (state, optimizer) = trainer_state::load(&dir.join("trainer"), optim, &mut decoder)?;
    Ok((decoder, state, optimizer))
}

/// Opens the run folder, checks that it is the same run, and rewinds its logs to the newest checkpoint.
/// `None`: it was killed before its first checkpoint and starts over.
fn resume(config: &RunConfig, mode: Mode) -> Result<(RunDir, Option<std::path::PathBuf>)> {
    let run = RunDir::open(&config.output)?;
    let newest = run.checkpoints()?.pop();
    if newest.is_some() {
        let earlier = crate::config::parse(&run.config_yaml()?, &[])?;
        check_same_run(&earlier, config, mode)?;
    }
    let step = newest.as_ref().map_or(0, |(step, _)| *step);
    if let Some((_, dir)) = &newest {
        let text = std::fs::read_to_string(dir.join("trainer/state.json")).unwrap_or_default();
        let other = match mode {
            Mode::Rl => Mode::Sft,
            Mode::Sft => Mode::Rl,
        };
        if serde_json::from_str::<TrainerState>(&text).is_ok_and(|s| s.mode == other) {
            let detail =
                "the run in it was started by the other command (train or sft); use that one"
                    .into();
            return Err(Error::Resume {
                path: config.output.clone(),
                detail,
            });
        }
    }
    for (file, key) in [
        ("metrics.jsonl", "training/global_step"),
        ("samples.jsonl", "step"),
        ("memory.jsonl", "step"),
    ] {
        // a run that starts over keeps nothing; one that goes on keeps what its checkpoint knows
        match &newest {
            Some(_) => run.rewind(file, key, step)?,
            None => run.write(file, b"")?,
        }
    }
    run.write("config.yaml", config.to_yaml()?.as_bytes())?;
    Ok((run, newest.map(|(_, dir)| dir)))
}

/// Only the run's length, rhythm, device and memory may change between sessions; what the mode does not read may too.
fn check_same_run(earlier: &RunConfig, now: &RunConfig, mode: Mode) -> Result<()> {
    let value = |config: &RunConfig| {
        let mut value = serde_json::to_value(config).unwrap_or(Value::Null);
        if mode == Mode::Sft {
            let steps = if config.sft.is_some() {
                "/sft/steps"
            } else {
                "/warmup/sft/steps"
            };
            value.pointer_mut(steps).map(Value::take);
        }
        value
    };
    let (before, after) = (value(earlier), value(now));
    let used: &[&str] = match mode {
        Mode::Rl => &[
            "model",
            "task",
            "objective",
            "rollout",
            "update",
            "optim",
            "warmup",
        ],
        Mode::Sft if now.sft.is_some() => &["model", "task", "sft"],
        Mode::Sft => &["model", "task", "warmup"],
    };
    let mut changed: Vec<String> = used
        .iter()
        .filter(|k| before[**k] != after[**k])
        .map(|k| (*k).to_owned())
        .collect();
    let trainer: &[&str] = match mode {
        Mode::Rl => &["seed", "train_batch_size"],
        Mode::Sft => &["seed"],
    };
    for key in trainer {
        if before["trainer"][*key] != after["trainer"][*key] {
            changed.push(format!("trainer.{key}"));
        }
    }
    if changed.is_empty() {
        return Ok(());
    }
    let detail = format!(
        "the configuration differs from the run's own in {}; change it back, or start a new run with another `output`",
        changed.join(", ")
    );
    Err(Error::Resume {
        path: now.output.clone(),
        detail,
    })
}
