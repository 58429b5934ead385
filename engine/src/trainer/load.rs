//! Weights and state of a run: loaded fresh, or from the checkpoint that it continues from.

use super::recover::{agreed_attempt, attempt};
use super::resume::Found;
use super::setup::{Opened, PlannedRun};
use super::{CRITIC, REFERENCE};
use crate::Result;
use crate::checkpoint::trainer_state::{self, TrainerState};
use crate::checkpoint::{CriticSource, RunDir};
use crate::config::Mode;
use crate::executor::{BoundaryLog, Residency, ResidentModel, Runtime, kept_values};
use crate::learner::Learner;
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
    /// The checkpoint that the run continues from.
    checkpoint: Option<PathBuf>,
}

impl Loaded {
    /// Loads what the run starts with and restores what its checkpoint keeps beside the weights. Where memory runs out,
    /// under the next cheaper plan. Gives the state that the run begins with, and whether it is a checkpoint's.
    pub fn begin(
        opened: &Opened,
        planned: &mut PlannedRun,
        found: &Found,
        programs: &Programs,
    ) -> Result<(Self, TrainerState, bool)> {
        loop {
            let attempt = attempt(|| {
                let watch = Watch::start(&opened.device)?;
                let mut loaded = Self::load(opened, planned, found, programs)?;
                let (state, resumed) = loaded.restore(opened.mode)?;
                watch.finish()?;
                loaded.check_computed()?;
                Ok((loaded, state, resumed))
            });
            match agreed_attempt(&opened.world, attempt)? {
                Ok(begun) => return Ok(begun),
                Err(what) => planned.replan_after_oom(what, opened.config.memory.recover)?,
            }
        }
    }

    /// Waits until everything is where it was loaded to. What was refused memory says so when it is read, which may be
    /// in an update that cannot be run again.
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

    /// Loads the weights that a run starts with: of its newest checkpoint, or those of its configuration.
    fn load(opened: &Opened, planned: &PlannedRun, found: &Found, programs: &Programs) -> Result<Self> {
        let (config, plan) = (&opened.config, &planned.plan);
        let (runtime, log) = runtime(opened, plan);
        let around = Surroundings {
            device: &opened.device,
            memory: &config.memory,
            accounts: &runtime.accounts,
            log: Some(&log),
            precision: config.precision,
            tokenizer: &opened.source.tokenizer,
            world: &opened.world,
        };
        let reward_manager = if opened.judges() {
            RewardManager::with(programs.clone(), opened.data.prompts.task(), around)?
        } else {
            RewardManager::default()
        };
        let checkpoint = found.checkpoint.as_ref().map(|(_, folder)| folder.clone());
        let rows =
            runtime.accounts.hold(Category::Buffers, Home::Host, opened.data.prompts.task().held_bytes() as usize);
        let values = kept_values(plan.policy(), opened.source.checkpoint.arch(), &opened.world);
        let part = if keeps_whole_policy(plan, checkpoint.is_some()) {
            RankPart::default()
        } else {
            own_part(&opened.world, &values)
        };
        let decoder = match &checkpoint {
            Some(dir) => opened.source.saved(config, dir, part, &opened.device)?,
            None => opened.source.decoder(config, part, &opened.device)?,
        };
        let mut policy = policy_learner(opened, plan, decoder, part, runtime)?;
        // each model makes room for the next one, as it does in the phases
        policy.model.set_residency(Residency::Idle)?;
        let mut critic = critic_learner(opened, plan, &policy, checkpoint.as_deref())?;
        if let Some(critic) = &mut critic {
            critic.model.set_residency(Residency::Idle)?;
        }
        let kept = found.run.as_ref().filter(|_| checkpoint.is_some());
        let reference = reference(opened, plan, &policy, kept)?;
        policy.model.set_residency(Residency::Idle)?;
        Ok(Self { policy, critic, reference, reward_manager, log, rows, checkpoint })
    }

    /// Where the run continues from a checkpoint, restores what that keeps beside the weights. Gives the state that the
    /// run begins with, and whether it is a checkpoint's.
    fn restore(&mut self, mode: Mode) -> Result<(TrainerState, bool)> {
        let Some(checkpoint) = &self.checkpoint else {
            return Ok((TrainerState::new(mode), false));
        };
        let dir = checkpoint.join("trainer");
        let state = trainer_state::load_state(&dir)?;
        let policy = &mut self.policy;
        trainer_state::load_value_head(&dir, &mut policy.model.decoder, &policy.optimizer)?;
        let (steps, scaler) = (state.optimizer_steps, state.loss_scale);
        restore_optimizer(&dir, steps, scaler, &mut self.policy)?;
        if let Some(critic) = &mut self.critic {
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
    let runtime = runtime.with_log(Arc::clone(&log));
    opened.world.watch_buffers(runtime.peak_reader());
    (runtime, log)
}

/// The policy with its optimizer; with a value head, where the critic shares its trunk.
fn policy_learner(
    opened: &Opened,
    plan: &Plan,
    decoder: Decoder,
    part: RankPart<'_>,
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
    opened: &Opened,
    plan: &Plan,
    policy: &Learner,
    checkpoint: Option<&Path>,
) -> Result<Option<Learner>> {
    let (Some(config), Some(source), Some(plan)) = (opened.config.own_critic(), &opened.critic_source, plan.critic())
    else {
        return Ok(None);
    };
    let decoder = match checkpoint {
        Some(dir) => {
            let folder = dir.join("trainer").join(CRITIC);
            let values = kept_values(plan, &source.arch(), &opened.world);
            let saved = source.saved(&folder, own_part(&opened.world, &values), &opened.device)?;
            own_share(saved, &opened.world)?
        }
        None => fresh_critic(source, plan, &policy.model, opened.config.trainer.seed)?,
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
            let saved = Checkpoint::open(&run.path().join(REFERENCE))?.in_precision(policy.decoder().arch().precision);
            let values = kept_values(plan, saved.arch(), &opened.world);
            let saved = saved.load_part(own_part(&opened.world, &values), runtime.device())?;
            own_share(saved, &opened.world)?
        }
        None => policy.decoder().clone(),
    };
    let (plan, accounts) = (plan.clone(), &runtime.accounts);
    let model = ResidentModel::new(decoder, plan, Role::Reference, accounts);
    Ok(Some(model.shared_by(&opened.world)))
}

/// Restores masters, loss scale and moments of an optimizer from a folder of a checkpoint.
fn restore_optimizer(dir: &Path, steps: u64, scaler: Option<Scaler>, learner: &mut Learner) -> Result<()> {
    let Learner { model, optimizer, .. } = learner;
    trainer_state::load_masters(dir, &mut model.decoder, optimizer)?;
    optimizer.set_scaler(scaler);
    trainer_state::load_optimizer(dir, steps, &model.decoder, optimizer)
}
