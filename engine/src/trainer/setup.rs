//! Everything a run needs before its first step: device, tokenizer, model, data, run folder; fresh or resumed.

use super::same_run::check_same_run;
use super::{Observer, Trainer, critic};
use crate::config::{RunConfig, SftConfig};
use crate::critic::CriticSource;
use crate::dataset::{Dataset, Survey};
use crate::learner::Learner;
use crate::ledger::Ledger;
use crate::objective::Objective;
use crate::optim::OptimConfig;
use crate::placed::Placed;
use crate::plan::planner::Request;
use crate::plan::{ModelPlan, MomentKind, Plan, Role};
use crate::run_dir::RunDir;
use crate::runtime::Runtime;
use crate::source::Source;
use crate::task::Task;
use crate::trainer_state::{self, Mode, TrainerState};
use crate::{Error, Result};
use burn::tensor::{Device, FloatDType};
use firebrick_backends::accounts::Home;
use firebrick_backends::memory::{Source as ReadingSource, free_bytes, read};
use firebrick_backends::profile::DeviceProfile;
use firebrick_backends::{DeviceInfo, device};
use firebrick_models::{Arch, Checkpoint, Decoder};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the reference policy in the run folder.
const REFERENCE: &str = "reference";

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
        let objective: Arc<dyn Objective> = Arc::new(config.objective.clone());
        // with adapters the reference is the policy itself, with them off
        let compares =
            mode == Mode::Rl && objective.needs().reference && config.model.lora.is_none();
        let sft = sft_config(&config, mode)?;
        check_schedules(&config, sft.as_ref())?;
        device::allow_tf32(config.allow_tf32);
        let (device, info) = device::open(config.device)?;
        let max_validation = config.trainer.val_max_samples;
        let data = Dataset::new(
            task,
            source.tokenizer.clone(),
            config.rollout.prompt_length,
            max_validation,
        )?;
        let own = config.critic.as_ref().filter(|_| mode == Mode::Rl);
        let critic_source = own
            .map(|critic| CriticSource::open(&config, critic, &source))
            .transpose()?;
        let models = Models {
            reference: compares,
            critic: critic_source.is_some(),
        };
        let (request, plan) = planned(&config, &arch, &info, models, data.survey()?)?;
        let optim = match (&sft, mode) {
            (Some(sft), Mode::Sft) => sft.optim.clone(),
            _ => config.optim.clone(),
        };
        for (section, optim) in optimizers(&config, sft.as_ref(), mode) {
            check_optimizer(plan.policy(), &device, optim, section)?;
        }
        if let (Some(critic), Some(plan)) = (own, plan.critic()) {
            check_optimizer(plan, &device, &critic.optim, "critic.optim")?;
        }
        check_limit(&config, &device)?;
        let runtime = Runtime::new(&device)
            .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
            .with_limit(config.memory.limit.map(|limit| limit.0));
        let learner = |decoder| Learner::new(decoder, plan.policy().clone(), optim, runtime);
        let begun = begin(&config, &source, &device, (mode, start), learner)?;
        let Begun {
            run,
            learner,
            state,
            step,
        } = begun;
        let resumed = step.is_some();
        let critic = critic::begin(
            &config,
            critic_source.as_ref(),
            &plan,
            &learner,
            step.as_deref().map(|step| (step, &state)),
        )?;
        let reference = match plan.reference() {
            None => None,
            Some(own) => {
                let decoder = if resumed {
                    Checkpoint::open(&run.path().join(REFERENCE))?.load(&device)?
                } else {
                    learner.decoder().clone()
                };
                let accounts = &learner.runtime.accounts;
                Some(Placed::new(decoder, own.clone(), Role::Reference, accounts))
            }
        };
        let this = Self {
            ledger: Ledger::new(state.peak_bytes, &device, &learner.runtime.accounts),
            config,
            info,
            device,
            source,
            data,
            learner,
            reference,
            critic,
            critic_source,
            request,
            plan,
            replans: 0,
            uses: Vec::new(),
            objective,
            run,
            state,
            observer,
            resumed,
            skipped_in_a_row: BTreeMap::new(),
            phase_step: 0,
        };
        this.write_plans()?;
        Ok(this)
    }

    /// Keeps the reference policy with the run, in full precision, so that a resumed run compares with the same one.
    pub(super) fn keep_reference(&mut self) -> Result<()> {
        let Some(reference) = &mut self.reference else {
            return Ok(());
        };
        reference.replace(self.learner.decoder().clone());
        let (decoder, tokenizer) = (self.learner.decoder(), &self.source.tokenizer);
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
    if let Some(critic) = &config.critic {
        let optim = &critic.optim;
        optim.lr_scheduler.build(optim.lr, config.trainer.steps)?;
    }
    if let Some(sft) = sft {
        sft.optim.lr_scheduler.build(sft.optim.lr, sft.steps)?;
    }
    Ok(())
}

/// A run whose folder and models are there.
struct Begun {
    run: RunDir,
    learner: Learner,
    state: TrainerState,
    /// The checkpoint that it goes on from.
    step: Option<PathBuf>,
}

/// Which models a run has beside the policy.
#[derive(Clone, Copy)]
struct Models {
    reference: bool,
    critic: bool,
}

/// Begins a new run, or finds the one in the output folder.
fn begin(
    config: &RunConfig,
    source: &Source,
    device: &Device,
    (mode, start): (Mode, Start),
    learner: impl FnOnce(Decoder) -> Learner,
) -> Result<Begun> {
    let newest = match start {
        Start::Fresh => {
            RunDir::check_free(&config.output)?;
            None
        }
        Start::Resume => Some(resume(config, mode)?),
    };
    if let Some((run, Some(dir))) = newest {
        let (decoder, state) = restored(config, source, &dir, device)?;
        let mut learner = learner(decoder);
        restore_optimizer(&dir, &state, &mut learner)?;
        return Ok(Begun {
            run,
            learner,
            state,
            step: Some(dir),
        });
    }
    let learner = learner(source.decoder(config, device)?);
    let run = match newest {
        Some((run, _)) => run,
        // the folder is made last, so that a run that cannot start leaves nothing in its own way
        None => RunDir::create(&config.output, &config.to_yaml()?)?,
    };
    Ok(Begun {
        run,
        learner,
        state: TrainerState::new(mode),
        step: None,
    })
}

/// Refuses an optimizer that the plan or the device cannot serve, and warns of one that will not do what it says.
fn check_optimizer(
    plan: &ModelPlan,
    device: &Device,
    optim: &OptimConfig,
    section: &str,
) -> Result<()> {
    plan.check_optimizer(optim, section)?;
    if plan.optimizer.moments != MomentKind::Bf16 {
        return Ok(());
    }
    if plan.optimizer.home == Home::Device && !device.supports_dtype(FloatDType::BF16) {
        return Err(Error::Config(
            "memory.moments: bf16 needs a device that stores bf16, and this one does not; use block8, or keep them on the \
             host with memory.optimizer_offload: cpu"
                .into(),
        ));
    }
    if optim.betas[1] > 0.99 {
        // a change of 1 − β₂ is below half of bf16's last digit
        tracing::warn!(
            "bf16 second moments cannot shrink where {section}.betas[1] is above 0.99 (it is {}): steps get smaller than \
             they should; memory.moments: block8 saves more and does not have that",
            optim.betas[1]
        );
    }
    Ok(())
}

/// A limit on bytes that nobody counts would be none.
fn check_limit(config: &RunConfig, device: &Device) -> Result<()> {
    if config.memory.limit.is_some() && read(device).source == ReadingSource::None {
        return Err(Error::Config(
            "memory.limit needs bytes to be counted, and this program does not count its heap: make \
             firebrick::backends::allocator::CountingAllocator its global allocator"
                .into(),
        ));
    }
    Ok(())
}

/// The plan of a run: the one in a file, the one that fits the budget, or what the settings spell out.
fn planned(
    config: &RunConfig,
    arch: &Arch,
    info: &DeviceInfo,
    models: Models,
    survey: Survey,
) -> Result<(Request, Plan)> {
    let profile = DeviceProfile::of(info);
    let mut request = Request::of_run(config, arch, profile, free_bytes(info))?;
    request.workload.reference = models.reference;
    if !models.critic {
        request.workload.critic = None;
    }
    request.workload.observe(survey);
    let plan = match (&config.memory.plan, request.budget) {
        (Some(path), _) => Plan::load(path)?,
        (None, Some(_)) => request.fit()?.plan,
        (None, None) => request.as_configured()?.plan,
    };
    for (role, model) in &plan.models {
        let critic = request.workload.critic_arch();
        model.check(critic.filter(|_| *role == Role::Critic).unwrap_or(arch))?;
    }
    for (wanted, found, what) in [
        (
            models.reference,
            plan.reference(),
            "compares with a reference policy",
        ),
        (models.critic, plan.critic(), "has a critic"),
    ] {
        if wanted && found.is_none() {
            return Err(Error::Plan(format!(
                "the objective {what}, and the plan has none; make one for this configuration with \
                 `firebrick plan CONFIG --output FILE`"
            )));
        }
    }
    Ok((request, plan))
}

/// The optimizers that a mode will use, and the sections of the config that describe them.
fn optimizers<'c>(
    config: &'c RunConfig,
    sft: Option<&'c SftConfig>,
    mode: Mode,
) -> Vec<(&'static str, &'c OptimConfig)> {
    let section = match mode {
        Mode::Sft if config.sft.is_some() => "sft.optim",
        _ => "warmup.sft.optim",
    };
    let sft = sft.map(|sft| (section, &sft.optim));
    let rl = (mode == Mode::Rl).then_some(("optim", &config.optim));
    sft.into_iter().chain(rl).collect()
}

fn restored(
    config: &RunConfig,
    source: &Source,
    dir: &Path,
    device: &Device,
) -> Result<(Decoder, TrainerState)> {
    let mut decoder = source.saved(config, dir, device)?;
    let trainer = dir.join("trainer");
    let state = trainer_state::load_state(&trainer)?;
    trainer_state::load_masters(&trainer, &mut decoder)?;
    Ok((decoder, state))
}

fn restore_optimizer(dir: &Path, state: &TrainerState, learner: &mut Learner) -> Result<()> {
    let Learner {
        model, optimizer, ..
    } = learner;
    let (trainer, steps) = (dir.join("trainer"), state.optimizer_steps);
    trainer_state::load_optimizer(&trainer, steps, &model.decoder, optimizer)
}

/// Opens the run folder, checks that it is the same run, and rewinds its logs to the newest checkpoint.
/// `None`: it was killed before its first checkpoint and starts over.
fn resume(config: &RunConfig, mode: Mode) -> Result<(RunDir, Option<PathBuf>)> {
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
