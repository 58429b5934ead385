//! Everything a run needs before its first step: device, tokenizer, model, data, run folder; fresh or resumed.

use super::resume::resume;
use super::{Observer, Trainer, critic};
use crate::config::{RunConfig, SftConfig};
use crate::critic::CriticSource;
use crate::data::{Data, Survey, sft_of, task_of};
use crate::judge::Judge;
use crate::learner::Learner;
use crate::ledger::Ledger;
use crate::objective::Objective;
use crate::objective::advantage::MultiObjective;
use crate::optim::OptimConfig;
use crate::placed::Placed;
use crate::plan::estimate::RewardWork;
use crate::plan::planner::Request;
use crate::plan::{ModelPlan, MomentKind, Plan, Role};
use crate::reward_model::{Surroundings, architecture};
use crate::run_dir::RunDir;
use crate::runtime::Runtime;
use crate::source::Source;
use crate::task::{Split, Task};
use crate::trainer_state::{self, Mode, TrainerState};
use crate::{Error, Result};
use burn::tensor::{Device, FloatDType};
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels::few_rows;
use firebrick_backends::memory::{Source as ReadingSource, free_bytes, read};
use firebrick_backends::profile::DeviceProfile;
use firebrick_backends::{DeviceInfo, Precision, device};
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
        let source = Source::open(&config.model, task.as_ref())?.in_precision(config.precision);
        let arch = source.checkpoint.arch().clone();
        let samples = mode == Mode::Rl || !task.is_empty(Split::Validation);
        if samples {
            source.check_lengths(&config)?;
        }
        check_rewards(&config, task.as_ref())?;
        let objective: Arc<dyn Objective> = Arc::new(config.objective.clone());
        // with adapters the reference is the policy itself, with them off
        let compares =
            mode == Mode::Rl && objective.needs().reference && config.model.lora.is_none();
        let sft = sft_of(&config, mode)?;
        check_schedules(&config)?;
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
        let optim = own_optimizer(&config, sft, mode);
        check_limit(&config, &device)?;
        check_quantised(&config, mode, &plan, &info);
        let runtime = Runtime::new(&device)
            .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
            .with_limit(config.memory.limit.map(|limit| limit.0))
            .with_determinism(config.deterministic);
        let judge = Judge::open(
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
            let (decoder, value_rate) = with_shared_critic(decoder, &config, mode);
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
        let critic = critic::begin(
            &config,
            critic_source.as_ref(),
            &plan,
            &learner,
            step.as_deref().map(|step| (step, &state)),
        )?;
        let reference = reference(&plan, &learner, &run, resumed)?;
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

/// The policy with a value head, where the critic shares its trunk, and how fast that head learns beside it.
fn with_shared_critic(policy: Decoder, config: &RunConfig, mode: Mode) -> (Decoder, f64) {
    match config.shared_critic().filter(|_| mode == Mode::Rl) {
        Some(critic) => (
            policy.with_joint_value_head(config.trainer.seed),
            critic.value_rate(&config.optim),
        ),
        None => (policy, 1.0),
    }
}

/// The reference policy: the policy as it is, or the one that a resumed run keeps in its folder.
fn reference(
    plan: &Plan,
    learner: &Learner,
    run: &RunDir,
    resumed: bool,
) -> Result<Option<Placed>> {
    let Some(own) = plan.reference() else {
        return Ok(None);
    };
    let runtime = &learner.runtime;
    let decoder = if resumed {
        Checkpoint::open(&run.path().join(REFERENCE))?
            .in_precision(learner.decoder().arch().precision)
            .load(runtime.device())?
    } else {
        learner.decoder().clone()
    };
    let (own, accounts) = (own.clone(), &runtime.accounts);
    Ok(Some(Placed::new(decoder, own, Role::Reference, accounts)))
}

/// Refuses what an objective would undo, and reward models that are none, before anything is loaded.
fn check_rewards(config: &RunConfig, task: &dyn Task) -> Result<()> {
    let Some(rewards) = task.rewards() else {
        return Ok(());
    };
    for (name, model) in rewards.models() {
        architecture(name, model)?;
    }
    let by_part = config.objective.multi_objective_aggregation == MultiObjective::NormalizeThenSum;
    if by_part && rewards.shapes() {
        return Err(Error::Config(
            "objective.multi_objective_aggregation: normalize_then_sum normalises every reward in its group, whatever `normalize` and `clip` of a reward say; remove those, or use sum_then_normalize"
                .into(),
        ));
    }
    Ok(())
}

fn check_schedules(config: &RunConfig) -> Result<()> {
    let critic = config.own_critic().map(|critic| &critic.optim);
    for optim in std::iter::once(&config.optim).chain(critic) {
        optim.lr_scheduler.build(optim.lr, config.trainer.steps)?;
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

/// What a run asks of its plan beyond its configuration.
struct Asked {
    models: Models,
    /// Reward models on its device.
    rewards: Vec<RewardWork>,
    survey: Survey,
    mode: Mode,
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

/// Refuses optimizers that a run's plans or device cannot serve.
fn check_optimizers(
    config: &RunConfig,
    sft: Option<&(&'static str, SftConfig)>,
    mode: Mode,
    plan: &Plan,
    device: &Device,
) -> Result<()> {
    let at = (device, config.precision);
    for (section, optim) in optimizers(config, sft, mode) {
        check_optimizer(plan.policy(), at, optim, &section)?;
    }
    match (config.own_critic(), plan.critic()) {
        (Some(critic), Some(plan)) if mode == Mode::Rl => {
            check_optimizer(plan, at, &critic.optim, "critic.optim")
        }
        _ => Ok(()),
    }
}

/// Refuses an optimizer that the plan or the device cannot serve, and warns of one that will not do what it says.
fn check_optimizer(
    plan: &ModelPlan,
    (device, precision): (&Device, Precision),
    optim: &OptimConfig,
    section: &str,
) -> Result<()> {
    plan.check_optimizer(optim, precision, section)?;
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
    asked: Asked,
) -> Result<(Request, Plan)> {
    let Asked {
        models,
        rewards,
        survey,
        mode,
    } = asked;
    let profile = DeviceProfile::of(info);
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
    let backend = DeviceProfile::of(&info).backend;
    config.rollout.check_on(backend, config.precision)?;
    Ok((device, info))
}

/// Says where sampling in 8 bits moves more bytes than it saves.
fn check_quantised(config: &RunConfig, mode: Mode, plan: &Plan, info: &DeviceInfo) {
    let (rollout, backend) = (&config.rollout, DeviceProfile::of(info).backend);
    let few = few_rows(backend, rollout.precision(config.precision).is_half());
    let prompts = config.trainer.train_batch_size;
    let together = rollout.dynamic_sampling.prompts(prompts) * rollout.n;
    let most = plan.rollout.max_num_seqs.min(together);
    if mode == Mode::Rl && rollout.quantization.is_some() && most > few {
        tracing::warn!(
            "rollout.quantization: int8 with {most} sequences at a time: above {few} every token widens whole matrices on {}, \
             which moves more bytes than the weights have; set rollout.max_num_seqs: {few}, or leave the key out",
            backend.name()
        );
    }
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

/// The optimizers that a mode will use, and the sections of the config that describe them.
fn optimizers<'c>(
    config: &'c RunConfig,
    sft: Option<&'c (&'static str, SftConfig)>,
    mode: Mode,
) -> Vec<(String, &'c OptimConfig)> {
    let sft = sft.map(|(section, sft)| (format!("{section}.optim"), &sft.optim));
    let rl = (mode == Mode::Rl).then_some(("optim".to_owned(), &config.optim));
    sft.into_iter().chain(rl).collect()
}

fn restored(
    config: &RunConfig,
    source: &Source,
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
