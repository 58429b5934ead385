//! The models of a run and their loading, fresh or from the checkpoint that the run continues from.

use super::attempt::{agreed_attempt, attempt};
use super::session::resume::RunFiles;
use super::session::{Planned, Session};
use crate::Result;
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, RunDir};
use crate::config::{Matmul, Mode};
use crate::executor::{BoundaryLog, Residency, ResidentModel, Runtime, kept_values};
use crate::learner::Learner;
use crate::metrics::Phase;
use crate::optim::Scaler;
use crate::plan::{ModelPlan, Plan, Role, Zero};
use crate::reward::{Programs, RewardManager, SharedResources};
use crate::world::World;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::allocation_trace::{AllocationTrace, TraceSource};
use firebrick_backends::kernels::CUBLASLT_OPERATIONS;
use firebrick_backends::memory::{ReadingSource, read};
use firebrick_backends::out_of_memory::Watch;
use firebrick_models::decoder::{RankShard, ValueRange};
use firebrick_models::unit::UnitKind;
use firebrick_models::{Checkpoint, Decoder};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the critic in the trainer's part of a checkpoint.
pub(super) const CRITIC: &str = "critic";

/// Folder of the reference policy in the run folder.
pub(super) const REFERENCE: &str = "reference";

/// The models of a run.
pub(super) struct Models {
    pub policy: Learner,
    /// A separate critic.
    pub critic: Option<Learner>,
    /// A separate reference policy; with adapters it is the policy without them.
    pub reference: Option<ResidentModel>,
    /// Account of the data's rows.
    _rows: MemoryGuard,
}

impl Models {
    /// The learner that a phase updates.
    pub fn learner(&mut self, phase: Phase) -> &mut Learner {
        match (phase.updates(), &mut self.critic) {
            (Some(Role::Critic), Some(critic)) => critic,
            (Some(Role::Critic), None) => unreachable!("a phase of the critic"),
            (Some(Role::Policy | Role::Reference | Role::RewardModel) | None, _) => &mut self.policy,
        }
    }

    /// Places every model for a phase; models that leave the device move first.
    pub fn place(&mut self, phase: Phase, world: &World) -> Result<()> {
        // without a separate model, the reference is the policy without its adapters
        let reference = if self.reference.is_some() { Role::Reference } else { Role::Policy };
        let on_groups = world.sampling_size() > 1 || world.tensor_size() > 1;
        let residency = |role| {
            let by_phase = phase.models().iter().find(|(used, _)| match used {
                Role::Reference => role == reference,
                used => role == *used,
            });
            match by_phase {
                // the sampling shard is made from idle weights
                Some((_, Residency::Rollout)) if on_groups => Residency::Idle,
                Some((_, residency)) => *residency,
                None => Residency::Idle,
            }
        };
        let critic = self.critic.as_mut().map(|critic| &mut critic.model);
        let models = [Some(&mut self.policy.model), self.reference.as_mut(), critic].into_iter().flatten();
        let mut models: Vec<_> = models.map(|model| (residency(model.role()), model)).collect();
        models.sort_by_key(|(residency, _)| *residency != Residency::Idle);
        models.into_iter().try_for_each(|(residency, model)| model.set_residency(residency))
    }

    /// Takes another plan; optimizer state stays.
    pub fn replan(&mut self, plan: &Plan) -> Result<()> {
        self.policy.runtime.forget_graphs();
        self.policy.replan(plan.policy())?;
        if let (Some(critic), Some(plan)) = (&mut self.critic, plan.critic()) {
            critic.replan(plan)?;
        }
        if let (Some(model), Some(plan)) = (&mut self.reference, plan.reference()) {
            model.take_plan(plan);
        }
        Ok(())
    }

    /// Waits for all loads. A tensor that was refused memory reports it when it is read, which must not happen in an
    /// update that cannot be repeated.
    fn check_computed(&self) -> Result<()> {
        self.policy.check_computed()?;
        if let Some(critic) = &self.critic {
            critic.check_computed()?;
        }
        if let Some(reference) = &self.reference {
            reference.decoder.check_computed()?;
        }
        Ok(())
    }
}

/// Models and rewards at the start of a run.
pub(super) struct Loaded {
    pub models: Models,
    pub reward_manager: RewardManager,
    pub log: Arc<BoundaryLog>,
    /// Checkpoint that the run continues from.
    checkpoint: Option<PathBuf>,
}

impl Loaded {
    /// Loads models and restores the state of their checkpoint, under the next cheaper plan if memory runs out. Returns
    /// the initial state of the run, and true if it is a checkpoint's.
    pub fn begin(
        session: &Session,
        planned: &mut Planned,
        run_files: &RunFiles,
        programs: &Programs,
    ) -> Result<(Self, TrainerState, bool)> {
        loop {
            let attempt = attempt(|| {
                let watch = Watch::start(&session.device)?;
                let mut loaded = Self::load(session, planned, run_files, programs)?;
                let (state, resumed) = loaded.restore(session.mode)?;
                watch.finish()?;
                loaded.models.check_computed()?;
                Ok((loaded, state, resumed))
            });
            match agreed_attempt(&session.world, attempt)? {
                Ok(begun) => return Ok(begun),
                Err(what) => planned.replan_after_oom(what, session.config.memory.recover)?,
            }
        }
    }

    /// Loads the weights of the newest checkpoint, or those of the configuration.
    fn load(session: &Session, planned: &Planned, run_files: &RunFiles, programs: &Programs) -> Result<Self> {
        let (config, plan) = (&session.config, &planned.plan);
        let (runtime, log) = runtime(session, plan);
        let shared = SharedResources {
            device: &session.device,
            memory: &config.memory,
            accounts: &runtime.accounts,
            log: Some(&log),
            precision: config.precision,
            tokenizer: &session.source.tokenizer,
            world: &session.world,
        };
        let reward_manager = if session.judges() {
            RewardManager::open(programs.clone(), session.data.prompts.task(), shared)?
        } else {
            RewardManager::default()
        };
        let checkpoint = run_files.checkpoint.as_ref().map(|(_, folder)| folder.clone());
        let rows =
            runtime.accounts.hold(Category::Buffers, Home::Host, session.data.prompts.task().held_bytes() as usize);
        let values = kept_values(plan.policy(), session.source.checkpoint.arch(), &session.world);
        let whole = loads_whole_policy(plan, checkpoint.is_some());
        let part = if whole { RankShard::default() } else { rank_part(&session.world, &values) };
        let decoder = match &checkpoint {
            Some(dir) => session.source.saved(config, dir, part, &session.device)?,
            None => session.source.decoder(config, part, &session.device)?,
        };
        let mut policy = policy_learner(session, plan, decoder, part, runtime)?;
        // each model makes room for the next one, as in the phases
        policy.model.set_residency(Residency::Idle)?;
        let mut critic = critic_learner(session, plan, &policy, checkpoint.as_deref())?;
        if let Some(critic) = &mut critic {
            critic.model.set_residency(Residency::Idle)?;
        }
        let kept = run_files.origin.as_ref().or(run_files.folder.as_ref()).filter(|_| checkpoint.is_some());
        let reference = reference(session, plan, &policy, kept)?;
        policy.model.set_residency(Residency::Idle)?;
        let models = Models { policy, critic, reference, _rows: rows };
        Ok(Self { models, reward_manager, log, checkpoint })
    }

    /// Restores the state of the checkpoint, if the run continues from one. Returns the initial state of the run, and
    /// true if it is a checkpoint's.
    fn restore(&mut self, mode: Mode) -> Result<(TrainerState, bool)> {
        let Some(checkpoint) = &self.checkpoint else {
            return Ok((TrainerState::new(mode), false));
        };
        let dir = checkpoint.join("trainer");
        let state = trainer_state::load_state(&dir)?;
        let Models { policy, critic, .. } = &mut self.models;
        trainer_state::load_value_head(&dir, &mut policy.model.decoder, &policy.optimizer)?;
        let (steps, scaler) = (state.optimizer_steps, state.loss_scale);
        restore_optimizer(&dir, steps, scaler, policy)?;
        if let Some(critic) = critic {
            let (steps, scaler) = (state.critic_steps, state.critic_loss_scale);
            restore_optimizer(&dir.join(CRITIC), steps, scaler, critic)?;
        }
        Ok((state, true))
    }
}

/// Returns true if a rank loads the whole policy: if only one of policy and reference policy is sharded.
fn loads_whole_policy(plan: &Plan, resumed: bool) -> bool {
    let sharded = |model: &ModelPlan| model.zero == Zero::Stage3;
    !resumed && plan.reference().is_some_and(|reference| sharded(reference) != sharded(plan.policy()))
}

/// This rank's part of a model, given the values that it keeps of a parameter.
fn rank_part<'a>(world: &World, values: &'a dyn Fn(UnitKind, usize) -> Option<ValueRange>) -> RankShard<'a> {
    RankShard { share: world.tensor_share(), values: Some(values) }
}

/// Runtime that all learners of a run share, with its boundary log.
fn runtime(session: &Session, plan: &Plan) -> (Runtime, Arc<BoundaryLog>) {
    let config = &session.config;
    let runtime = Runtime::new(&session.device)
        .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
        .with_limit(config.memory.limit.map(|limit| limit.0))
        .with_determinism(config.deterministic)
        .with_cublaslt((config.matmul == Matmul::Cublaslt).then_some(CUBLASLT_OPERATIONS))
        .with_world(session.world.clone());
    let trace = (config.memory.trace > 0).then(|| {
        let source = match read(&session.device).source {
            ReadingSource::CountedHeap => TraceSource::Heap,
            ReadingSource::BurnPool | ReadingSource::None => TraceSource::Accounts,
        };
        AllocationTrace::start(source, config.memory.trace)
    });
    let log = BoundaryLog::new(&runtime.accounts, trace);
    let runtime = runtime.with_log(Arc::clone(&log));
    session.world.watch_buffers(runtime.peak_reader());
    (runtime, log)
}

/// The policy with its optimizer, and with a value head if the critic shares its trunk.
fn policy_learner(
    session: &Session,
    plan: &Plan,
    decoder: Decoder,
    part: RankShard<'_>,
    runtime: Runtime,
) -> Result<Learner> {
    let (config, optim) = (&session.config, session.optimizer().clone());
    let learner = |decoder: Decoder| {
        let decoder = if session.is_exact() { decoder.with_exact_sums()? } else { decoder };
        let decoder = rank_share(decoder, &session.world)?;
        let mut learner = Learner::new(decoder, plan.policy().clone(), optim, runtime);
        learner.router_aux_loss_coef = config.model.router_aux_loss_coef;
        Ok(learner)
    };
    match config.shared_critic().filter(|_| session.mode == Mode::Rl) {
        Some(critic) => {
            let policy = learner(decoder.with_joint_value_head(part, config.trainer.seed))?;
            Ok(policy.with_value_rate(critic.value_rate(&config.optim)))
        }
        None => learner(decoder),
    }
}

/// This rank's tensor-parallel share or pipeline stage of a model; else the model.
fn rank_share(decoder: Decoder, world: &World) -> Result<Decoder> {
    if let Some(stage) = world.pipeline_stage() {
        return Ok(decoder.with_stage(stage)?);
    }
    match world.tensor_share() {
        Some(share) if decoder.share().is_none() => Ok(decoder.training_shard(share)?),
        _ => Ok(decoder),
    }
}

/// A separate critic, fresh or with the weights of a checkpoint.
fn critic_learner(
    session: &Session,
    plan: &Plan,
    policy: &Learner,
    checkpoint: Option<&Path>,
) -> Result<Option<Learner>> {
    let (Some(config), Some(source), Some(plan)) = (session.config.own_critic(), &session.critic_source, plan.critic())
    else {
        return Ok(None);
    };
    let decoder = match checkpoint {
        Some(dir) => {
            let folder = dir.join("trainer").join(CRITIC);
            let values = kept_values(plan, &source.arch(), &session.world);
            let saved = source.saved(&folder, rank_part(&session.world, &values), &session.device)?;
            rank_share(saved, &session.world)?
        }
        None => fresh_critic(source, plan, &policy.model, session.config.trainer.seed)?,
    };
    let (optim, runtime) = (config.optim.clone(), policy.runtime.for_critic());
    let critic = Learner::for_role(Role::Critic, decoder, plan.clone(), optim, runtime);
    Ok(Some(critic))
}

/// This rank's part of an untrained critic, which may start from the policy.
pub(super) fn fresh_critic(
    source: &CriticSource,
    plan: &ModelPlan,
    policy: &ResidentModel,
    seed: u64,
) -> Result<Decoder> {
    let world = policy.world();
    let values = kept_values(plan, &source.arch(), world);
    let decoder = source.start(&policy.read_together(), rank_part(world, &values), seed)?;
    rank_share(decoder, world)
}

/// A separate reference policy: the policy, or the one in the folder of a resumed run.
fn reference(
    session: &Session,
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
            let saved = Checkpoint::open(&run.path().join(REFERENCE))?.in_precision(policy.decoder().arch().precision);
            let values = kept_values(plan, saved.arch(), &session.world);
            let saved = saved.load_shard(rank_part(&session.world, &values), runtime.device())?;
            rank_share(saved, &session.world)?
        }
        None => policy.decoder().clone(),
    };
    let model = ResidentModel::new(decoder, plan.clone(), Role::Reference, &runtime.accounts);
    Ok(Some(model.shared_by(&session.world)))
}

/// Restores masters, loss scale and moments of an optimizer from a folder of a checkpoint.
fn restore_optimizer(dir: &Path, steps: u64, scaler: Option<Scaler>, learner: &mut Learner) -> Result<()> {
    let Learner { model, optimizer, .. } = learner;
    trainer_state::load_masters(dir, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(scaler);
    trainer_state::load_optimizer(dir, steps, &model.decoder, optimizer)
}
