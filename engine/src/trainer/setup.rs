//! Everything a run needs before its first step: device, tokenizer, model, data, run folder; fresh or resumed.

use super::checks::{check_limit, check_optimizers, check_quantised, check_rewards};
use super::resume::resume;
use super::{Observer, Trainer, models};
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, PolicySource, RunDir};
use crate::config::{Mode, RunConfig, SftConfig, sft_of};
use crate::data::{Data, DatasetStats, task_of};
use crate::executor::Runtime;
use crate::learner::Learner;
use crate::lr_scheduler::LrSchedule;
use crate::metrics::{Ledger, PhaseTimings};
use crate::objective::Objective;
use crate::optim::OptimConfig;
use crate::plan::estimate::RewardWork;
use crate::plan::planner::Request;
use crate::plan::{Plan, Role};
use crate::reward::{RewardManager, Surroundings};
use crate::task::{Split, Task};
use crate::{Error, Result};
use burn::tensor::Device;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::{DeviceInfo, PrecisionExt, device, profile};
use firebrick_models::{Arch, Decoder};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
        let task = task_of(&config, mode)?;
        Self::with_task(config, task, mode, start, observer)
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
        let source =
            PolicySource::open(&config.model, task.as_ref())?.in_precision(config.precision);
        let arch = source.checkpoint.arch().clone();
        let samples = mode == Mode::Rl || !task.is_empty(Split::Validation);
        if samples {
            source.check_lengths(&config)?;
        }
        check_rewards(&config, task.as_ref())?;
        let objective: Arc<dyn Objective> = Arc::new(config.objective.build()?);
        // with adapters the reference is the policy itself, with them off
        let compares =
            mode == Mode::Rl && objective.needs().reference && config.model.lora.is_none();
        let sft = sft_of(&config, mode)?;
        LrSchedules::new(&config, None, config.trainer.steps)?;
        let (device, info) = open_device(&config)?;
        let data = Data::read(&config, task, &source, mode)?;
        let own = config.own_critic().filter(|_| mode == Mode::Rl);
        let critic_source = own
            .map(|critic| CriticSource::open(&config, critic, &source))
            .transpose()?;
        let models = Models {
            reference: compares,
            critic: critic_source.is_some(),
        };
        let asked = Asked {
            models,
            rewards: data
                .prompts
                .task()
                .rewards()
                .map_or_else(|| Ok(Vec::new()), |r| RewardWork::of(r, &config))?,
            survey: data.survey(&source)?,
            mode,
        };
        let (request, plan) = planned(&config, &arch, &info, asked)?;
        check_optimizers(&config, sft.as_ref(), mode, &plan, &device)?;
        let steps = data.demonstrations.as_ref().filter(|_| mode == Mode::Sft);
        let steps = steps.map_or(config.trainer.steps, |examples| examples.steps);
        let schedules =
            LrSchedules::new(&config, sft.as_ref().filter(|_| mode == Mode::Sft), steps)?;
        let optim = own_optimizer(&config, sft, mode);
        check_limit(&config, &device)?;
        check_quantised(&config, mode, &plan, &info);
        let runtime = Runtime::new(&device)
            .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
            .with_limit(config.memory.limit.map(|limit| limit.0))
            .with_determinism(config.deterministic);
        let judge = RewardManager::open(
            data.prompts.task(),
            Surroundings {
                device: &device,
                memory: &config.memory,
                accounts: &runtime.accounts,
                precision: config.precision,
                tokenizer: &source.tokenizer,
            },
        )?;
        let learner = |decoder| {
            let (decoder, value_rate) = models::with_shared_critic(decoder, &config, mode);
            Learner::new(decoder, plan.policy().clone(), optim, runtime).with_value_rate(value_rate)
        };
        let begun = begin(&config, &source, &device, (mode, start), learner)?;
        let Begun {
            run,
            learner,
            state,
            step,
        } = begun;
        let resumed = step.is_some();
        let critic = models::critic(
            &config,
            critic_source.as_ref(),
            &plan,
            &learner,
            step.as_deref().map(|step| (step, &state)),
        )?;
        let reference = models::reference(&plan, &learner, &run, resumed)?;
        let this = Self {
            ledger: Ledger::new(state.peak_bytes, &device, &learner.runtime.accounts),
            config,
            info,
            device,
            source,
            data: data.prompts,
            demonstrations: data.demonstrations,
            learner,
            reference,
            judge,
            critic,
            critic_source,
            request,
            plan,
            replans: 0,
            objective,
            run,
            state,
            observer,
            steps,
            lr: schedules.policy,
            critic_lr: schedules.critic,
            begun: resumed,
            timings: PhaseTimings::default(),
            skipped_in_a_row: BTreeMap::new(),
            phase_step: 0,
        };
        this.write_plans()?;
        Ok(this)
    }
}

/// The learning-rate schedules of a run's steps.
struct LrSchedules {
    policy: LrSchedule,
    /// Of a critic with an optimizer of its own.
    critic: Option<LrSchedule>,
}

impl LrSchedules {
    /// Those of RL, or of supervised training by a section's settings.
    fn new(
        config: &RunConfig,
        sft: Option<&(&'static str, SftConfig)>,
        steps: u64,
    ) -> Result<Self> {
        let schedule =
            |optim: &OptimConfig| Ok::<_, Error>(optim.lr_scheduler.build(optim.lr, steps)?);
        let policy = schedule(sft.map_or(&config.optim, |(_, sft)| &sft.optim))?;
        let critic = config.own_critic().filter(|_| sft.is_none());
        let critic = critic.map(|critic| schedule(&critic.optim)).transpose()?;
        Ok(Self { policy, critic })
    }
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

/// What a run asks of its plan beyond its configuration.
struct Asked {
    models: Models,
    /// Reward models on its device.
    rewards: Vec<RewardWork>,
    survey: DatasetStats,
    mode: Mode,
}

/// Begins a new run, or finds the one in the output folder.
fn begin(
    config: &RunConfig,
    source: &PolicySource,
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

/// The plan of a run: the one in a file, the one that fits the budget, or what the settings spell out.
fn planned(
    config: &RunConfig,
    arch: &Arch,
    info: &DeviceInfo,
    asked: Asked,
) -> Result<(Request, Plan)> {
    let Asked {
        models,
        rewards,
        survey,
        mode,
    } = asked;
    let profile = profile::of(info);
    let mut request = Request::of_run(config, mode, arch, profile, free_bytes(info))?;
    request.workload.reference = models.reference;
    if !models.critic {
        request.workload.critic = None;
    }
    request.workload.rewards = rewards;
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
    request.check_buffers(&plan)?;
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

/// The device of a run, which has to compute in the run's precision.
fn open_device(config: &RunConfig) -> Result<(Device, DeviceInfo)> {
    device::allow_tf32(config.allow_tf32);
    let (device, info) = device::open(config.device)?;
    config.precision.check(&device)?;
    config.rollout.precision(config.precision).check(&device)?;
    let backend = profile::of(&info).backend;
    config.rollout.check_on(backend, config.precision)?;
    Ok((device, info))
}

/// The optimizer that the policy begins with.
fn own_optimizer(
    config: &RunConfig,
    sft: Option<(&'static str, SftConfig)>,
    mode: Mode,
) -> OptimConfig {
    match (sft, mode) {
        (Some((_, sft)), Mode::Sft) => sft.optim,
        _ => config.optim.clone(),
    }
}

fn restored(
    config: &RunConfig,
    source: &PolicySource,
    dir: &Path,
    device: &Device,
) -> Result<(Decoder, TrainerState)> {
    let decoder = source.saved(config, dir, device)?;
    let trainer = dir.join("trainer");
    let state = trainer_state::load_state(&trainer)?;
    Ok((decoder, state))
}

fn restore_optimizer(dir: &Path, state: &TrainerState, learner: &mut Learner) -> Result<()> {
    let Learner {
        model, optimizer, ..
    } = learner;
    let (trainer, steps) = (dir.join("trainer"), state.optimizer_steps);
    trainer_state::load_value_head(&trainer, &mut model.decoder)?;
    trainer_state::load_masters(&trainer, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(state.loss_scale);
    trainer_state::load_optimizer(&trainer, steps, &model.decoder, optimizer)
}
