//! Weights and state of a run: loaded fresh, or from the checkpoint that it continues from.

use super::recover::{agreed_attempt, attempt};
use super::resume::resume;
use super::setup::{Opened, PlannedRun};
use super::{CRITIC, REFERENCE, Start};
use crate::Result;
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, RunDir};
use crate::config::Mode;
use crate::executor::{BoundaryLog, Residency, ResidentModel, Runtime};
use crate::learner::Learner;
use crate::optim::Scaler;
use crate::plan::{Plan, Role};
use crate::reward::{RewardManager, Surroundings};
use crate::world::World;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::allocation_trace::{AllocationTrace, TraceSource};
use firebrick_backends::memory::{ReadingSource, read};
use firebrick_backends::out_of_memory::Watch;
use firebrick_models::{Checkpoint, Decoder};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The models of a run.
pub(super) struct Loaded {
    pub policy: Learner,
    /// A critic of its own.
    pub critic: Option<Learner>,
    /// A reference policy of its own.
    pub reference: Option<ResidentModel>,
    pub reward_manager: RewardManager,
    /// What is held at the boundaries of the run.
    pub log: Arc<BoundaryLog>,
    /// The rows of the data, as the accounts count them.
    pub rows: MemoryGuard,
    /// The run folder, where there is one already.
    folder: Option<RunDir>,
    /// The checkpoint that the run continues from.
    checkpoint: Option<PathBuf>,
}

impl Loaded {
    /// Loads what the run starts with and restores what its checkpoint keeps beside the weights. Where memory runs out, under the next
    /// cheaper plan. Gives the state that the run begins with, and whether it is a checkpoint's.
    pub fn begin(
        opened: &Opened,
        planned: &mut PlannedRun,
        start: Start,
    ) -> Result<(Self, TrainerState, bool)> {
        loop {
            let attempt = attempt(|| {
                let watch = Watch::start(&opened.device)?;
                let mut loaded = Self::load(opened, planned, start)?;
                let (state, resumed) = loaded.restore(opened.mode)?;
                watch.finish()?;
                Ok((loaded, state, resumed))
            });
            match agreed_attempt(&opened.world, attempt)? {
                Ok(begun) => return Ok(begun),
                Err(what) => planned.step_down(what, opened.config.memory.recover)?,
            }
        }
    }

    /// Loads the weights that a run starts with: of its newest checkpoint, or those of its configuration.
    fn load(opened: &Opened, planned: &PlannedRun, start: Start) -> Result<Self> {
        let (config, plan) = (&opened.config, &planned.plan);
        let (runtime, log) = runtime(opened, plan);
        let around = Surroundings {
            device: &opened.device,
            memory: &config.memory,
            accounts: &runtime.accounts,
            log: Some(&log),
            precision: config.precision,
            tokenizer: &opened.source.tokenizer,
        };
        let reward_manager = if opened.judges() {
            RewardManager::open(opened.data.prompts.task(), around)?
        } else {
            RewardManager::default()
        };
        let (folder, checkpoint) = match start {
            Start::Fresh => {
                // where another rank looks, rank 0 may have made it already
                if opened.world.writes() {
                    RunDir::check_free(&config.output)?;
                }
                (None, None)
            }
            Start::Resume => {
                let (folder, checkpoint) = resume(config, opened.mode, &opened.world)?;
                (Some(folder), checkpoint)
            }
        };
        let rows = runtime.accounts.hold(
            Category::Buffers,
            Home::Host,
            opened.data.prompts.task().held_bytes() as usize,
        );
        let critic = opened.critic_source.as_ref();
        // a critic starts from a whole policy, and a value head stands beside one
        let needs_whole =
            critic.is_some_and(CriticSource::follows_policy) || config.shared_critic().is_some();
        let own = opened.world.tensor_share().filter(|_| !needs_whole);
        let decoder = match &checkpoint {
            Some(dir) => opened.source.saved(config, dir, own, &opened.device)?,
            None => opened.source.decoder(config, own, &opened.device)?,
        };
        let shares = opened.world.tensor_share().is_some();
        let whole = (shares && needs_whole).then(|| decoder.clone());
        let mut policy = policy_learner(opened, plan, decoder, runtime)?;
        // each model makes room for the next one, as it does in the phases; what ranks share out is whole until all of it is there
        if !policy.model.is_shared_out() {
            policy.model.set_residency(Residency::Idle)?;
        }
        let checkpoint_path = checkpoint.as_deref();
        let start = whole.as_ref().unwrap_or(policy.decoder());
        let mut critic = critic_learner(opened, plan, &policy, start, checkpoint_path)?;
        drop(whole);
        if let Some(critic) = &mut critic
            && !critic.model.is_shared_out()
        {
            critic.model.set_residency(Residency::Idle)?;
        }
        let kept = folder.as_ref().filter(|_| checkpoint.is_some());
        let reference = reference(opened, plan, &policy, kept)?;
        Ok(Self {
            policy,
            critic,
            reference,
            reward_manager,
            log,
            rows,
            folder,
            checkpoint,
        })
    }

    /// Where the run continues from a checkpoint, restores what that keeps beside the weights. Gives the state that the run begins
    /// with, and whether it is a checkpoint's.
    fn restore(&mut self, mode: Mode) -> Result<(TrainerState, bool)> {
        let Some(checkpoint) = &self.checkpoint else {
            return Ok((TrainerState::new(mode), false));
        };
        let dir = checkpoint.join("trainer");
        let state = trainer_state::load_state(&dir)?;
        trainer_state::load_value_head(&dir, &mut self.policy.model.decoder)?;
        let (steps, scaler) = (state.optimizer_steps, state.loss_scale);
        restore_optimizer(&dir, steps, scaler, &mut self.policy)?;
        if let Some(critic) = &mut self.critic {
            let (steps, scaler) = (state.critic_steps, state.critic_loss_scale);
            restore_optimizer(&dir.join(CRITIC), steps, scaler, critic)?;
        }
        Ok((state, true))
    }

    /// The run folder. A new one is made last, so that a run that cannot start leaves none in its own way.
    pub fn folder(&mut self, opened: &Opened) -> Result<RunDir> {
        match self.folder.take() {
            Some(folder) => Ok(folder),
            None => opened.world.together(if opened.world.writes() {
                RunDir::create(&opened.config.output, &opened.config.to_yaml()?)
            } else {
                Ok(RunDir::of_another(&opened.config.output))
            }),
        }
    }
}

/// What all learners of a run share, with the log of its boundaries.
fn runtime(opened: &Opened, plan: &Plan) -> (Runtime, Arc<BoundaryLog>) {
    let config = &opened.config;
    let runtime = Runtime::new(&opened.device)
        .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
        .with_limit(config.memory.limit.map(|limit| limit.0))
        .with_determinism(config.deterministic)
        .with_world(opened.world.clone());
    let trace = (config.memory.trace > 0).then(|| {
        let source = match read(&opened.device).source {
            ReadingSource::CountedHeap => TraceSource::Heap,
            ReadingSource::BurnPool | ReadingSource::None => TraceSource::Accounts,
        };
        AllocationTrace::start(source, config.memory.trace)
    });
    let log = BoundaryLog::new(&runtime.accounts, trace);
    (runtime.with_log(Arc::clone(&log)), log)
}

/// The policy with its optimizer; with a value head, where the critic shares its trunk.
fn policy_learner(
    opened: &Opened,
    plan: &Plan,
    decoder: Decoder,
    runtime: Runtime,
) -> Result<Learner> {
    let (config, optim) = (&opened.config, opened.optimizer().clone());
    let learner = |decoder| {
        let decoder = own_share(decoder, &opened.world)?;
        let mut own = Learner::new(decoder, plan.policy().clone(), optim, runtime);
        own.router_aux_loss_coef = config.model.router_aux_loss_coef;
        Ok(own)
    };
    match config.shared_critic().filter(|_| opened.mode == Mode::Rl) {
        Some(critic) => {
            let own = learner(decoder.with_joint_value_head(config.trainer.seed))?;
            Ok(own.with_value_rate(critic.value_rate(&config.optim)))
        }
        None => learner(decoder),
    }
}

/// This rank's share of a model, where ranks share matrices; the model with its stage, where these divide the layers; else the model.
pub(super) fn own_share(decoder: Decoder, world: &World) -> Result<Decoder> {
    if let Some(stage) = world.pipeline_stage() {
        return Ok(decoder.in_stage(stage)?);
    }
    match world.tensor_share() {
        Some(share) if decoder.share().is_none() => Ok(decoder.trained_share(share)?),
        _ => Ok(decoder),
    }
}

/// A critic of its own, which may start from the whole policy `start`, fresh or with the weights of a checkpoint.
fn critic_learner(
    opened: &Opened,
    plan: &Plan,
    policy: &Learner,
    start: &Decoder,
    checkpoint: Option<&Path>,
) -> Result<Option<Learner>> {
    let (Some(config), Some(source), Some(plan)) = (
        opened.config.own_critic(),
        &opened.critic_source,
        plan.critic(),
    ) else {
        return Ok(None);
    };
    let decoder = match checkpoint {
        Some(dir) => source.saved(&dir.join("trainer").join(CRITIC), &opened.device)?,
        None => source.start(start, opened.config.trainer.seed)?,
    };
    let decoder = own_share(decoder, &opened.world)?;
    let (optim, runtime) = (config.optim.clone(), policy.runtime.of_critic());
    let critic = Learner::for_role(Role::Critic, decoder, plan.clone(), optim, runtime);
    Ok(Some(critic))
}

/// A reference policy of its own: the policy as it is, or the one that a resumed run keeps in its folder.
fn reference(
    opened: &Opened,
    plan: &Plan,
    policy: &Learner,
    resumed: Option<&RunDir>,
) -> Result<Option<ResidentModel>> {
    let Some(plan) = plan.reference() else {
        return Ok(None);
    };
    let runtime = &policy.runtime;
    let decoder = match resumed {
        Some(run) => {
            let saved = Checkpoint::open(&run.path().join(REFERENCE))?
                .in_precision(policy.decoder().arch().precision)
                .load_share(opened.world.tensor_share(), runtime.device())?;
            own_share(saved, &opened.world)?
        }
        None => policy.decoder().clone(),
    };
    let (plan, accounts) = (plan.clone(), &runtime.accounts);
    let model = ResidentModel::new(decoder, plan, Role::Reference, accounts);
    Ok(Some(match opened.world.pipeline_stage() {
        Some(_) => model.shared_by(&opened.world),
        None => model,
    }))
}

/// Restores masters, loss scale and moments of an optimizer from a folder of a checkpoint.
fn restore_optimizer(
    dir: &Path,
    steps: u64,
    scaler: Option<Scaler>,
    learner: &mut Learner,
) -> Result<()> {
    let Learner {
        model, optimizer, ..
    } = learner;
    trainer_state::load_masters(dir, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(scaler);
    trainer_state::load_optimizer(dir, steps, &model.decoder, optimizer)
}
