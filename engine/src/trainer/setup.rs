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
        let source = Source::open(&config.model, config.task.as_ref())?;
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
        let (run, resumed) = match start {
            Start::Fresh => (RunDir::create(&config.output, &config.to_yaml()?)?, None),
            Start::Resume => resume(&config, mode)?,
        };
        let objective = objective(&config.objective);
        let (decoder, state, optimizer) = match &resumed {
            Some(dir) => restored(dir, &optim, &device)?,
            None => fresh(&config, &source, &optim, mode, &device)?,
        };
        let reference_dir = run.path().join(REFERENCE);
        let reference = match (
            mode == Mode::Rl && objective.needs_reference(),
            resumed.is_some(),
        ) {
            (false, _) => None,
            (true, true) => Some(Checkpoint::open(&reference_dir)?.load(&device)?),
            (true, false) => Some(decoder.clone()),
        };
        run.write_json(
            "plan.json",
            &json!({"models": {"policy": plan}, "predicted": Value::Null}),
        )?;
        Ok(Self {
            ledger: Ledger::new(state.peak_bytes),
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
            resumed: resumed.is_some(),
            skipped_in_a_row: 0,
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
    let earlier = crate::config::parse(&run.config_yaml()?, &[])?;
    check_same_run(&earlier, config)?;
    let newest = run.checkpoints()?.pop();
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

/// Only the run's length, rhythm, device and memory may change between sessions.
fn check_same_run(earlier: &RunConfig, now: &RunConfig) -> Result<()> {
    let value = |config: &RunConfig| serde_json::to_value(config).unwrap_or(Value::Null);
    let (earlier, now_value) = (value(earlier), value(now));
    let keys = [
        "model",
        "task",
        "objective",
        "rollout",
        "update",
        "optim",
        "warmup",
        "sft",
    ];
    let mut changed: Vec<String> = keys
        .iter()
        .filter(|k| earlier[**k] != now_value[**k])
        .map(|k| (*k).to_owned())
        .collect();
    for key in ["seed", "train_batch_size"] {
        if earlier["trainer"][key] != now_value["trainer"][key] {
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
