//! Session: everything of a run except weights and state, opened and checked once.

pub(super) mod checks;
mod ranks;
pub(super) mod resume;
mod sharding;

use super::turns::turn_template;
use crate::checkpoint::{CriticSource, PolicySource, checksums};
use crate::config::{Matmul, Mode, OldLogProbs, RunConfig, SftConfig, sft_of};
use crate::data::Data;
use crate::hub::ModelFiles;
use crate::lr_scheduler::LrSchedule;
use crate::objective::Objective;
use crate::optim::OptimConfig;
use crate::plan::estimate::{Estimate, Parallel};
use crate::plan::planner::Request;
use crate::plan::{Error as PlanError, Plan, PlannedFor, Role, Zero};
use crate::planning;
use crate::task::{Split, Task};
use crate::turns::TurnTemplate;
use crate::world::World;
use crate::{Error, Result};
use burn::tensor::Device;
use checks::{
    START_ALIKE, check_device, check_limit, check_optimizers, check_parallel_training, check_quantized,
    check_reward_models, check_rewards, check_sampling_groups, check_size, select_objective,
};
use firebrick_backends::accounts::Home;
use firebrick_backends::collective::Collective;
use firebrick_backends::kernels::open_cublaslt;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::{DeviceInfo, DeviceSpec, PrecisionExt, device, profile};
use firebrick_spec::Cluster;
use ranks::{cluster, connect, profile_of};
use std::sync::Arc;

/// Everything of a run except weights and state. It does not change during the run.
pub(super) struct Session {
    pub config: RunConfig,
    pub mode: Mode,
    /// Steps of the whole run.
    pub steps: u64,
    /// Ranks of the run.
    pub world: World,
    pub source: PolicySource,
    pub objective: Arc<dyn Objective>,
    /// Settings of supervised training and their section in the configuration.
    pub sft: Option<(&'static str, SftConfig)>,
    pub device: Device,
    pub info: DeviceInfo,
    pub data: Data,
    /// Chat template of multi-turn rollouts.
    pub turns: Option<TurnTemplate>,
    /// Source of the weights of a separate critic.
    pub critic_source: Option<CriticSource>,
}

/// Memory plan of a run.
pub(super) struct Planned {
    /// The planner's request.
    pub request: Request,
    /// The current plan.
    pub plan: Plan,
    /// Plans taken because an earlier one ran out of memory.
    pub replans: u64,
}

impl Planned {
    /// Prediction of the current plan.
    pub fn estimate(&self) -> Estimate {
        self.request.predict(self.plan.clone()).estimate
    }
}

impl Session {
    /// Reads and checks everything that a resolved configuration names. `objective` replaces the configured one;
    /// `files` are the files to fetch of a model of the Hub.
    pub fn open(
        mut config: RunConfig,
        mode: Mode,
        task: Arc<dyn Task>,
        objective: Option<Arc<dyn Objective>>,
        ranks: &Arc<dyn Collective>,
        files: ModelFiles,
    ) -> Result<Self> {
        let world = World::new(Arc::clone(ranks));
        check_size(&config.trainer, &world)?;
        let spec = config.device;
        // first, because the values of a preset depend on the device
        let (device, info) = open_device(&mut config)?;
        check_device(&world, spec, &info)?;
        let world = World::new(connect(ranks, config.trainer.ddp_backend, &device, &info)?);
        if files == ModelFiles::All {
            checksums::verify_models(&config, task.as_ref(), &world)?;
        }
        let source = PolicySource::with(&config.model, task.as_ref(), files)?;
        let source = source.in_format(config.precision, config.base());
        source.log_ends(&config.rollout.stop);
        config.rollout.check_graphs(source.checkpoint.arch())?;
        let profile = profile::of(&info);
        planning::check_preset_share(&mut config, mode, source.checkpoint.arch(), &profile)?;
        if mode == Mode::Rl || !task.is_empty(Split::Validation) {
            source.check_lengths(&config)?;
        }
        check_rewards(task.as_ref())?;
        let objective = select_objective(objective, &config, task.as_ref())?;
        let turns = turn_template(&config, objective.needs(), task.as_ref(), &source)?;
        let sft = sft_of(&config, mode)?;
        LrSchedules::new(&config, None, config.trainer.steps)?;
        let data = Data::read(&config, task, &source, mode)?;
        let critic = config.own_critic().filter(|_| mode == Mode::Rl);
        let critic_source = critic.map(|critic| CriticSource::open(&config, critic, &source, files));
        let critic_source = critic_source.transpose()?;
        let critic_arch = critic_source.as_ref().map(CriticSource::arch);
        check_parallel_training(&config, source.checkpoint.arch(), critic_arch.as_ref())?;
        check_sampling_groups(&config, source.checkpoint.arch(), data.prompts.task())?;
        let mut world = world
            .with_sequence_parallel(config.memory.ulysses_sequence_parallel_size)?
            .with_tensor_parallel(config.memory.tensor_model_parallel_size)?
            .with_pipeline_stages(config.memory.pipeline_model_parallel_size)?
            .with_rollout_tensor_parallel(config.rollout.tensor_model_parallel_size)?;
        if let Some(degree) = config.critic_sequences().filter(|_| mode == Mode::Rl) {
            world = world.with_critic_sequence_parallel(degree)?;
        }
        let steps = match (mode, &data.demonstrations) {
            (Mode::Sft, Some(examples)) => examples.steps,
            _ => config.trainer.steps,
        };
        Ok(Self { config, mode, steps, world, source, objective, sft, device, info, data, turns, critic_source })
    }

    /// Plans the run's memory, and checks that plan and device support its optimizers. Also returns their learning
    /// rates.
    pub fn plan(&self) -> Result<(Planned, LrSchedules)> {
        let config = &self.config;
        let mut request = self.request()?;
        let plan = self.find_plan(&request)?;
        planning::check_longest(&plan, &request.workload, config.memory.plan.is_some())?;
        if self.judges() {
            let longest = request.workload.prompt_length as usize;
            check_reward_models(config, &self.data.prompts, &self.source.tokenizer, longest)?;
        }
        request.memory.set_zero(plan.policy().zero);
        request.parallel = self.parallel(plan.policy().zero, cluster(&self.world, &request.profile)?);
        request.workload.kv_cache_bytes =
            planning::cache_bytes(config, self.source.checkpoint.arch(), &request, &plan)?;
        check_optimizers(self, &plan)?;
        let sft = self.sft.as_ref().filter(|_| self.mode == Mode::Sft);
        let schedules = LrSchedules::new(config, sft, self.steps)?;
        check_limit(self)?;
        check_quantized(self, &plan);
        Ok((Planned { request, plan, replans: 0 }, schedules))
    }

    /// Rejects, before anything is loaded, settings that several ranks do not support, and ranks that differ.
    pub fn check_ranks(&self, plan: &Plan) -> Result<()> {
        let world = &self.world;
        if world.is_solo() {
            return Ok(());
        }
        if plan.models.values().any(|model| model.optimizer.in_backward) {
            return Err(Error::Ranks(
                "memory.step_in_backward updates a unit before other ranks have its gradient; set it to false, or start \
                 one rank"
                    .into(),
            ));
        }
        let plan = serde_json::to_vec(plan).unwrap_or_default();
        world.same("the memory plan", START_ALIKE, &plan)?;
        // ranks may have devices and limits of their own
        let mut config = RunConfig { device: DeviceSpec::Auto, ..self.config.clone() };
        config.memory.limit = None;
        world.same("the configuration", START_ALIKE, config.to_yaml()?.as_bytes())
    }

    /// Returns true if the sampler's log-probs are the trainer's to the bit.
    pub fn is_exact(&self) -> bool {
        self.mode == Mode::Rl && self.config.is_exact(self.info.device.backend(), self.source.checkpoint.arch())
    }

    /// Source of the old log-probs.
    pub fn old_log_probs(&self) -> OldLogProbs {
        self.config.old_log_probs(self.info.device.backend(), self.source.checkpoint.arch())
    }

    /// Returns true if completions get rewards: not in supervised training without validation prompts.
    pub fn judges(&self) -> bool {
        self.mode == Mode::Rl || !self.data.prompts.validation.is_empty()
    }

    /// The planner's request.
    fn request(&self) -> Result<Request> {
        let (config, arch) = (&self.config, self.source.checkpoint.arch());
        let rewards = self.data.prompts.task().rewards();
        let rewards = rewards.filter(|_| self.judges());
        let rewards = rewards.map_or_else(|| Ok(Vec::new()), |r| planning::reward_work(r, config))?;
        let stats = self.data.stats(&self.source)?;
        let (profile, free) = (profile_of(&self.world, &self.info)?, self.free_bytes()?);
        let parallel = self.parallel(config.memory.zero(), cluster(&self.world, &profile)?);
        let mut request = planning::request(config, self.mode, arch, profile, free)?;
        request.parallel = parallel;
        request.ranks = self.world.size();
        if self.mode == Mode::Rl {
            planning::set_needs(&mut request.workload, self.objective.needs());
        }
        if self.critic_source.is_none() {
            request.workload.critic = None;
        }
        request.workload.rewards = rewards;
        planning::observe(&mut request.workload, stats);
        Ok(request)
    }

    /// Parallelism that the prediction assumes. Without `ZeRO`, NCCL and groups of ranks, a plan is as for one rank.
    fn parallel(&self, zero: Zero, cluster: Option<Cluster>) -> Parallel {
        let (world, parallel) = (&self.world, self.divided(zero, cluster));
        let critic = world.for_critic().sequence_size();
        let groups = [world.sequence_size(), critic, world.sampling_size(), world.tensor_size(), world.stages()];
        let as_one = zero == Zero::Off && groups.iter().all(|&size| size == 1) && !parallel.nccl;
        if world.is_solo() || as_one { Parallel::default() } else { parallel }
    }

    /// Parallelism of the run's ranks at a `ZeRO` stage.
    pub(super) fn divided(&self, zero: Zero, cluster: Option<Cluster>) -> Parallel {
        let world = &self.world;
        let [sequence, critic_sequence, tensor, rollout_tensor] =
            [world.sequence_size(), world.for_critic().sequence_size(), world.tensor_size(), world.sampling_size()]
                .map(|size| size as u64);
        Parallel {
            cluster,
            data: world.data_size() as u64,
            // a single replica shards nothing
            zero: if world.replicas().is_solo() { Zero::Off } else { zero },
            tensor,
            pipeline: world.stages() as u64,
            sequence,
            critic_sequence: Some(critic_sequence).filter(|&size| size != sequence),
            rollout_tensor: Some(rollout_tensor).filter(|&size| size != tensor),
            nccl: world.buffers_home() == Home::Device,
        }
    }

    /// Free bytes of the device, the least of all ranks, so that all make the same plan; `None` if one rank does not
    /// know.
    fn free_bytes(&self) -> Result<Option<u64>> {
        let free = free_bytes(&self.info);
        if self.world.is_solo() {
            return Ok(free);
        }
        let ranks = self.world.gather::<Option<u64>>(&free)?;
        Ok(ranks.into_iter().collect::<Option<Vec<u64>>>().and_then(|free| free.into_iter().min()))
    }

    /// Returns true if there is a separate reference policy; with adapters it is the policy without them.
    fn has_reference(&self) -> bool {
        self.mode == Mode::Rl && self.objective.needs().reference && self.config.model.lora.is_none()
    }

    /// The plan in a file, the one that fits the budget, or the configured one.
    fn find_plan(&self, request: &Request) -> Result<Plan> {
        let (config, arch) = (&self.config, self.source.checkpoint.arch());
        let plan = match (&config.memory.plan, request.budget) {
            (Some(path), _) => Plan::load(
                path,
                &PlannedFor {
                    ranks: self.world.size(),
                    sequence: self.world.sequence_size(),
                    critic_sequence: self.world.for_critic().sequence_size(),
                    tensor: self.world.tensor_size(),
                    pipeline: self.world.stages(),
                    sampling: self.world.sampling_size(),
                },
            )?,
            (None, Some(_)) => self.fit(request)?,
            (None, None) => request.as_configured()?.plan,
        };
        for (role, model) in &plan.models {
            let critic = request.workload.critic_arch();
            model.check(critic.filter(|_| *role == Role::Critic).unwrap_or(arch))?;
        }
        request.check_buffers(&plan)?;
        for (needed, planned, what) in [
            (self.has_reference(), plan.reference(), "compares with a reference policy"),
            (self.critic_source.is_some(), plan.critic(), "has a critic"),
        ] {
            if needed && planned.is_none() {
                return Err(Error::Plan(PlanError::Plan(format!(
                    "the objective {what}, and the plan has none; make one for this configuration with \
                 `firebrick plan CONFIG --output FILE`"
                ))));
            }
        }
        Ok(plan)
    }

    /// Returns true if the policy is trained in the step after `finished` steps; not while only the critic is.
    pub fn trains_policy(&self, finished: u64) -> bool {
        finished >= self.config.critic.as_ref().map_or(0, |critic| critic.warmup)
    }

    /// The policy's first optimizer.
    pub fn optimizer(&self) -> &OptimConfig {
        match (&self.sft, self.mode) {
            (Some((_, sft)), Mode::Sft) => &sft.optim,
            _ => &self.config.optim,
        }
    }
}

/// The learning-rate schedules of a run's steps.
pub(super) struct LrSchedules {
    pub policy: LrSchedule,
    /// Of a separate critic.
    pub critic: Option<LrSchedule>,
}

impl LrSchedules {
    /// Schedules of RL, or of supervised training with a section's settings.
    fn new(config: &RunConfig, sft: Option<&(&'static str, SftConfig)>, steps: u64) -> Result<Self> {
        let schedule = |optim: &OptimConfig| Ok::<_, Error>(optim.lr_scheduler.build(optim.lr, steps)?);
        let policy = schedule(sft.map_or(&config.optim, |(_, sft)| &sft.optim))?;
        let critic = config.own_critic().filter(|_| sft.is_none());
        let critic = critic.map(|critic| schedule(&critic.optim)).transpose()?;
        Ok(Self { policy, critic })
    }
}

/// Opens the device of a run, which must support the run's precision. Drops preset values that it does not support.
fn open_device(config: &mut RunConfig) -> Result<(Device, DeviceInfo)> {
    device::allow_tf32(config.allow_tf32);
    let (device, info) = device::open(config.device)?;
    let profile = profile::of(&info);
    planning::restrict_to_device(config, &profile, Some(&info));
    config.precision.check(&device)?;
    config.rollout.precision(config.precision).check(&device)?;
    config.rollout.check_on(profile.backend, config.precision)?;
    config.check_exact_on(profile.backend)?;
    config.check_matmul_on(profile.backend)?;
    if config.matmul == Matmul::Cublaslt {
        let refused = |why| Error::Config(format!("matmul: cublaslt cannot be used: {why}; or remove the key"));
        let version = open_cublaslt(&device).map_err(refused)?;
        tracing::info!("large matmuls of training and scoring by cuBLASLt {version}");
    }
    Ok((device, info))
}
