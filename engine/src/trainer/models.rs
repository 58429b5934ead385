//! The models of a run, and how they are loaded: fresh, or from the checkpoint that the run continues from.

use super::attempt::{agreed_attempt, attempt};
use super::session::resume::Found;
use super::session::{Planned, Session};
use crate::Result;
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, RunDir};
use crate::config::Mode;
use crate::executor::{BoundaryLog, Residency, ResidentModel, Runtime, kept_values};
use crate::learner::Learner;
use crate::metrics::Phase;
use crate::optim::Scaler;
use crate::plan::{ModelPlan, Plan, Role, Zero};
use crate::reward::{Programs, RewardManager, Surroundings};
use crate::world::World;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::allocation_trace::{AllocationTrace, TraceSource};
use firebrick_backends::memory::{ReadingSource, read};
use firebrick_backends::out_of_memory::Watch;
use firebrick_models::decoder::{RankPart, ValueRange};
use firebrick_models::unit::UnitKind;
use firebrick_models::{Checkpoint, Decoder};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folder of the critic in the trainer's part of a checkpoint.
pub(super) const CRITIC: &str = "critic";

/// Folder of the reference policy in the run folder.
pub(super) const REFERENCE: &str = "reference";

/// The models of a run, each where the phase at hand needs it.
pub(super) struct Models {
    pub policy: Learner,
    /// A critic of its own.
    pub critic: Option<Learner>,
    /// A reference policy of its own; with adapters it is the policy with them off.
    pub reference: Option<ResidentModel>,
    /// The rows of the data, as the accounts count them.
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

    /// Brings every model to where a phase needs it: first away, then here.
    pub fn place(&mut self, phase: Phase, world: &World) -> Result<()> {
        // without a model of its own the reference is the policy with its adapters off
        let reference = if self.reference.is_some() { Role::Reference } else { Role::Policy };
        let on_groups = world.sampling_size() > 1 || world.tensor_size() > 1;
        let residency = |role| {
            let by_phase = phase.models().iter().find(|(used, _)| match used {
                Role::Reference => role == reference,
                used => role == *used,
            });
            match by_phase {
                // what samples is made from the weights where they wait
                Some((_, Residency::Rollout)) if on_groups => Residency::Idle,
                Some((_, now)) => *now,
                None => Residency::Idle,
            }
        };
        let critic = self.critic.as_mut().map(|critic| &mut critic.model);
        let models = [Some(&mut self.policy.model), self.reference.as_mut(), critic].into_iter().flatten();
        let mut models: Vec<_> = models.map(|model| (residency(model.role()), model)).collect();
        models.sort_by_key(|(now, _)| *now != Residency::Idle);
        models.into_iter().try_for_each(|(now, model)| model.set_residency(now))
    }

    /// Takes another plan; what optimizers have learnt stays.
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

    /// Waits until everything is where it was loaded to. What was refused memory says so when it is read, which may be
    /// in an update that cannot be run again.
    fn check_computed(&self) -> Result<()> {
        self.policy.check_computed()?;
        if let Some(critic) = &self.critic {
            critic.check_computed()?;
        }
        match &self.reference {
            Some(reference) => Ok(reference.decoder.check_computed()?),
            None => Ok(()),
        }
    }
}

/// What a run starts with.
pub(super) struct Loaded {
    pub models: Models,
    pub reward_manager: RewardManager,
    /// What is held at the boundaries of the run.
    pub log: Arc<BoundaryLog>,
    /// The checkpoint that the run continues from.
    checkpoint: Option<PathBuf>,
}

impl Loaded {
    /// Loads what the run starts with and restores what its checkpoint keeps beside the weights. Where memory runs out,
    /// under the next cheaper plan. Gives the state that the run begins with, and whether it is a checkpoint's.
    pub fn begin(
        session: &Session,
        planned: &mut Planned,
        found: &Found,
        programs: &Programs,
    ) -> Result<(Self, TrainerState, bool)> {
        loop {
            let attempt = attempt(|| {
                let watch = Watch::start(&session.device)?;
                let mut loaded = Self::load(session, planned, found, programs)?;
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

    /// Loads the weights that a run starts with: of its newest checkpoint, or those of its configuration.
    fn load(session: &Session, planned: &Planned, found: &Found, programs: &Programs) -> Result<Self> {
        let (config, plan) = (&session.config, &planned.plan);
        let (runtime, log) = runtime(session, plan);
        let around = Surroundings {
            device: &session.device,
            memory: &config.memory,
            accounts: &runtime.accounts,
            log: Some(&log),
            precision: config.precision,
            tokenizer: &session.source.tokenizer,
            world: &session.world,
        };
        let reward_manager = if session.judges() {
            RewardManager::with(programs.clone(), session.data.prompts.task(), around)?
        } else {
            RewardManager::default()
        };
        let checkpoint = found.checkpoint.as_ref().map(|(_, folder)| folder.clone());
        let rows =
            runtime.accounts.hold(Category::Buffers, Home::Host, session.data.prompts.task().held_bytes() as usize);
        let values = kept_values(plan.policy(), session.source.checkpoint.arch(), &session.world);
        let part = if keeps_whole_policy(plan, checkpoint.is_some()) {
            RankPart::default()
        } else {
            own_part(&session.world, &values)
        };
        let decoder = match &checkpoint {
            Some(dir) => session.source.saved(config, dir, part, &session.device)?,
            None => session.source.decoder(config, part, &session.device)?,
        };
        let mut policy = policy_learner(session, plan, decoder, part, runtime)?;
        // each model makes room for the next one, as it does in the phases
        policy.model.set_residency(Residency::Idle)?;
        let mut critic = critic_learner(session, plan, &policy, checkpoint.as_deref())?;
        if let Some(critic) = &mut critic {
            critic.model.set_residency(Residency::Idle)?;
        }
        let kept = found.run.as_ref().filter(|_| checkpoint.is_some());
        let reference = reference(session, plan, &policy, kept)?;
        policy.model.set_residency(Residency::Idle)?;
        let models = Models { policy, critic, reference, _rows: rows };
        Ok(Self { models, reward_manager, log, checkpoint })
    }

    /// Where the run continues from a checkpoint, restores what that keeps beside the weights. Gives the state that the
    /// run begins with, and whether it is a checkpoint's.
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

/// Whether a rank loads all of the policy: a reference policy keeps what ranks share out of the policy, or the other
/// way round.
fn keeps_whole_policy(plan: &Plan, resumed: bool) -> bool {
    let shares = |own: &ModelPlan| own.zero == Zero::Stage3;
    let unlike = |reference: &ModelPlan| shares(reference) != shares(plan.policy());
    !resumed && plan.reference().is_some_and(unlike)
}

/// What this rank has of a model that it loads, given what it keeps of a parameter.
fn own_part<'a>(world: &World, values: &'a dyn Fn(UnitKind, usize) -> Option<ValueRange>) -> RankPart<'a> {
    RankPart { share: world.tensor_share(), values: Some(values) }
}

/// What all learners of a run share, with the log of its boundaries.
fn runtime(session: &Session, plan: &Plan) -> (Runtime, Arc<BoundaryLog>) {
    let config = &session.config;
    let runtime = Runtime::new(&session.device)
        .with_prefetch(plan.models.values().map(|m| m.prefetch).max().unwrap_or(0))
        .with_limit(config.memory.limit.map(|limit| limit.0))
        .with_determinism(config.deterministic)
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

/// The policy with its optimizer; with a value head, where the critic shares its trunk.
fn policy_learner(
    session: &Session,
    plan: &Plan,
    decoder: Decoder,
    part: RankPart<'_>,
    runtime: Runtime,
) -> Result<Learner> {
    let (config, optim) = (&session.config, session.optimizer().clone());
    let learner = |decoder| {
        let decoder = own_share(decoder, &session.world)?;
        let mut own = Learner::new(decoder, plan.policy().clone(), optim, runtime);
        own.router_aux_loss_coef = config.model.router_aux_loss_coef;
        Ok(own)
    };
    match config.shared_critic().filter(|_| session.mode == Mode::Rl) {
        Some(critic) => {
            let own = learner(decoder.with_joint_value_head(part, config.trainer.seed))?;
            Ok(own.with_value_rate(critic.value_rate(&config.optim)))
        }
        None => learner(decoder),
    }
}

/// This rank's share of a model, where ranks share matrices; the model with its stage, where these divide the layers;
/// else the model.
pub(super) fn own_share(decoder: Decoder, world: &World) -> Result<Decoder> {
    if let Some(stage) = world.pipeline_stage() {
        return Ok(decoder.in_stage(stage)?);
    }
    match world.tensor_share() {
        Some(share) if decoder.share().is_none() => Ok(decoder.trained_share(share)?),
        _ => Ok(decoder),
    }
}

/// A critic of its own, fresh or with the weights of a checkpoint.
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
            let saved = source.saved(&folder, own_part(&session.world, &values), &session.device)?;
            own_share(saved, &session.world)?
        }
        None => fresh_critic(source, plan, &policy.model, session.config.trainer.seed)?,
    };
    let (optim, runtime) = (config.optim.clone(), policy.runtime.of_critic());
    let critic = Learner::for_role(Role::Critic, decoder, plan.clone(), optim, runtime);
    Ok(Some(critic))
}

/// This rank's part of a critic that has not been trained yet, which may start from the policy.
pub(super) fn fresh_critic(
    source: &CriticSource,
    plan: &ModelPlan,
    policy: &ResidentModel,
    seed: u64,
) -> Result<Decoder> {
    let world = policy.world();
    let values = kept_values(plan, &source.arch(), world);
    let part = own_part(world, &values);
    let decoder = source.start(&policy.read_together(), part, seed)?;
    own_share(decoder, world)
}

/// A reference policy of its own: the policy as it is, or the one that a resumed run keeps in its folder.
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
            let saved = saved.load_part(own_part(&session.world, &values), runtime.device())?;
            own_share(saved, &session.world)?
        }
        None => policy.decoder().clone(),
    };
    let (plan, accounts) = (plan.clone(), &runtime.accounts);
    let model = ResidentModel::new(decoder, plan, Role::Reference, accounts);
    Ok(Some(model.shared_by(&session.world)))
}

/// Restores masters, loss scale and moments of an optimizer from a folder of a checkpoint.
fn restore_optimizer(dir: &Path, steps: u64, scaler: Option<Scaler>, learner: &mut Learner) -> Result<()> {
    let Learner { model, optimizer, .. } = learner;
    trainer_state::load_masters(dir, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(scaler);
    trainer_state::load_optimizer(dir, steps, &model.decoder, optimizer)
}
