//! What a run is made of, weights apart: opened and checked once, then the same to its end.

pub(super) mod checks;
mod ranks;
pub(super) mod resume;
mod sharding;

use super::turns::turn_template;
use crate::checkpoint::{CriticSource, PolicySource};
use crate::config::{Mode, RunConfig, SftConfig, sft_of};
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
    START_ALIKE, check_device, check_layers, check_limit, check_matrices, check_optimizers, check_quantised,
    check_reward_models, check_rewards, check_sampling_groups, check_sequences, check_size, chosen_objective,
};
use firebrick_backends::accounts::Home;
use firebrick_backends::collective::Collective;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::{DeviceInfo, DeviceSpec, PrecisionExt, device, profile};
use firebrick_spec::Cluster;
use ranks::{cluster, connect, profile_of};
use std::sync::Arc;

/// What a run is made of, weights apart. Nothing of it changes while the run goes on.
pub(super) struct Session {
    pub config: RunConfig,
    pub mode: Mode,
    /// Steps of the whole run.
    pub steps: u64,
    /// The ranks that share the work.
    pub world: World,
    pub source: PolicySource,
    pub objective: Arc<dyn Objective>,
    /// Supervised training and its section in the configuration, where there is any.
    pub sft: Option<(&'static str, SftConfig)>,
    pub device: Device,
    pub info: DeviceInfo,
    pub data: Data,
    /// The chat template, where rollouts have several turns.
    pub turns: Option<TurnTemplate>,
    /// Where the weights of a critic of its own come from.
    pub critic_source: Option<CriticSource>,
}

/// How a run uses memory.
pub(super) struct Planned {
    /// What the planner was asked.
    pub request: Request,
    /// The plan in force.
    pub plan: Plan,
    /// Plans taken because one before ran out of memory.
    pub replans: u64,
}

impl Planned {
    /// What is predicted of the plan in force.
    pub fn estimate(&self) -> Estimate {
        self.request.predict(self.plan.clone()).estimate
    }
}

impl Session {
    /// Reads and checks what a resolved configuration names. `objective` takes the place of the configured one; `files`
    /// are those of a model of the Hub that are wanted.
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
        let asked = config.device;
        // first, because what a preset sets depends on the device
        let (device, info) = open_device(&mut config)?;
        check_device(&world, asked, &info)?;
        let world = World::new(connect(ranks, config.trainer.ddp_backend, &device, &info)?);
        let source = PolicySource::with(&config.model, task.as_ref(), files)?;
        let source = source.in_format(config.precision, config.base());
        source.log_ends(&config.rollout.stop);
        config.rollout.check_graphs_of(source.checkpoint.arch())?;
        let profile = profile::of(&info);
        planning::check_preset_share(&mut config, mode, source.checkpoint.arch(), &profile)?;
        if mode == Mode::Rl || !task.is_empty(Split::Validation) {
            source.check_lengths(&config)?;
        }
        check_rewards(task.as_ref())?;
        let objective = chosen_objective(objective, &config, task.as_ref())?;
        let turns = turn_template(&config, objective.needs(), task.as_ref(), &source)?;
        let sft = sft_of(&config, mode)?;
        LrSchedules::new(&config, None, config.trainer.steps)?;
        let data = Data::read(&config, task, &source, mode)?;
        let critic = config.own_critic().filter(|_| mode == Mode::Rl);
        let critic_source = critic.map(|critic| CriticSource::open(&config, critic, &source, files));
        let critic_source = critic_source.transpose()?;
        let critic_arch = critic_source.as_ref().map(CriticSource::arch);
        let critic_arch = critic_arch.as_ref();
        check_sequences(&config, source.checkpoint.arch(), critic_arch)?;
        check_matrices(&config, source.checkpoint.arch(), critic_arch)?;
        check_layers(&config, source.checkpoint.arch(), critic_arch)?;
        check_sampling_groups(&config, source.checkpoint.arch(), data.prompts.task())?;
        let mut world = world
            .sharing_sequences(config.memory.ulysses_sequence_parallel_size)?
            .sharing_matrices(config.memory.tensor_model_parallel_size)?
            .in_stages(config.memory.pipeline_model_parallel_size)?
            .sampling_together(config.rollout.tensor_model_parallel_size)?;
        if let Some(degree) = config.critic_sequences().filter(|_| mode == Mode::Rl) {
            world = world.sharing_critic_sequences(degree)?;
        }
        let steps = match (mode, &data.demonstrations) {
            (Mode::Sft, Some(examples)) => examples.steps,
            _ => config.trainer.steps,
        };
        Ok(Self { config, mode, steps, world, source, objective, sft, device, info, data, turns, critic_source })
    }

    /// Plans the run's memory, and checks that plan and device serve its optimizers. Gives their learning rates too.
    pub fn plan(&self) -> Result<(Planned, LrSchedules)> {
        let (config, mode) = (&self.config, self.mode);
        let mut request = self.request()?;
        let plan = self.find_plan(&request)?;
        planning::check_longest(&plan, &request.workload, config.memory.plan.is_some())?;
        if self.judges() {
            let longest = request.workload.prompt_length as usize;
            check_reward_models(config, &self.data.prompts, &self.source.tokenizer, longest)?;
        }
        request.memory.set_zero(plan.policy().zero);
        request.parallel = self.parallel(plan.policy().zero, cluster(&self.world, &request.profile)?);
        planning::resolve_kv_cache(config, self.source.checkpoint.arch(), &mut request, &plan)?;
        let sft = self.sft.as_ref();
        check_optimizers(config, sft, mode, &plan, &self.device)?;
        let schedules = LrSchedules::new(config, sft.filter(|_| mode == Mode::Sft), self.steps)?;
        check_limit(config, &self.device)?;
        check_quantised(config, mode, &plan, &self.info);
        Ok((Planned { request, plan, replans: 0 }, schedules))
    }

    /// Refuses, before anything is loaded, what several ranks do not do, and ranks that do not do the same.
    pub fn check_ranks(&self, plan: &Plan) -> Result<()> {
        let world = &self.world;
        if world.is_solo() {
            return Ok(());
        }
        let refuse = |what: String| Err(Error::Ranks(what));
        if plan.models.values().any(|model| model.optimizer.in_backward) {
            return refuse(
                "memory.step_in_backward updates a unit before other ranks have its gradient; set it to false, or start one rank".into(),
            );
        }
        let plan = serde_json::to_vec(plan).unwrap_or_default();
        world.same("the memory plan", START_ALIKE, &plan)?;
        world.same("the configuration", START_ALIKE, self.compared().to_yaml()?.as_bytes())
    }

    /// What has to be the same on every rank.
    fn compared(&self) -> RunConfig {
        let mut config = RunConfig {
            // a number of its own on every rank
            device: DeviceSpec::Auto,
            ..self.config.clone()
        };
        // a rank that exceeds its own tells the others
        config.memory.limit = None;
        config
    }

    /// Whether completions are judged: not in supervised training that validates on no prompts.
    pub fn judges(&self) -> bool {
        self.mode == Mode::Rl || !self.data.prompts.validation.is_empty()
    }

    /// What the planner is asked.
    fn request(&self) -> Result<Request> {
        let (config, arch) = (&self.config, self.source.checkpoint.arch());
        let rewards = self.data.prompts.task().rewards();
        let rewards = rewards.filter(|_| self.judges());
        let rewards = rewards.map_or_else(|| Ok(Vec::new()), |r| planning::reward_work(r, config))?;
        let examined = self.data.survey(&self.source)?;
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
        planning::observe(&mut request.workload, examined);
        Ok(request)
    }

    /// The ranks that predicted bytes are those of one of. Without `ZeRO` and NCCL a plan is as for one rank alone,
    /// where ranks share neither sequences nor matrices, and have no stages.
    fn parallel(&self, zero: Zero, cluster: Option<Cluster>) -> Parallel {
        let world = &self.world;
        let critic = world.of_critic().sequence_size();
        let groups = [world.sequence_size(), critic, world.sampling_size(), world.tensor_size(), world.stages()];
        let through_host = world.buffers_home() == Home::Host;
        let alike = zero == Zero::Off && groups.iter().all(|&n| n == 1) && through_host;
        if world.is_solo() || alike {
            return Parallel::default();
        }
        self.divided(zero, cluster)
    }

    /// How the ranks of this run divide its work, and what replicas share out at a stage.
    pub(super) fn divided(&self, zero: Zero, cluster: Option<Cluster>) -> Parallel {
        let sequence = self.world.sequence_size() as u64;
        let together = self.world.sampling_size() as u64;
        let tensor = self.world.tensor_size() as u64;
        let critic = self.world.of_critic().sequence_size() as u64;
        let replicas = self.world.replicas();
        Parallel {
            cluster,
            data: self.world.data_size() as u64,
            // one that has all shares nothing out
            zero: if replicas.is_solo() { Zero::Off } else { zero },
            tensor,
            pipeline: self.world.stages() as u64,
            sequence,
            critic_sequence: Some(critic).filter(|&n| n != sequence),
            rollout_tensor: Some(together).filter(|&n| n != tensor),
            nccl: self.world.buffers_home() == Home::Device,
        }
    }

    /// What the device has free; of several ranks the least, so that all make the same plan.
    fn free_bytes(&self) -> Result<Option<u64>> {
        let own = free_bytes(&self.info);
        if self.world.is_solo() {
            return Ok(own);
        }
        let all = self.world.gather::<Option<u64>>(&own)?;
        // where one does not know, nobody does
        Ok(all.into_iter().collect::<Option<Vec<u64>>>().and_then(|all| all.into_iter().min()))
    }

    /// Whether a reference policy has weights of its own; with adapters it is the policy with them off.
    fn has_reference(&self) -> bool {
        let compares = self.mode == Mode::Rl && self.objective.needs().reference;
        compares && self.config.model.lora.is_none()
    }

    /// The plan in a file, the one that fits the budget, or what the settings spell out.
    fn find_plan(&self, request: &Request) -> Result<Plan> {
        let (config, arch) = (&self.config, self.source.checkpoint.arch());
        let plan = match (&config.memory.plan, request.budget) {
            (Some(path), _) => Plan::load(
                path,
                &PlannedFor {
                    ranks: self.world.size(),
                    sequence: self.world.sequence_size(),
                    critic_sequence: self.world.of_critic().sequence_size(),
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
        for (wanted, found, what) in [
            (self.has_reference(), plan.reference(), "compares with a reference policy"),
            (self.critic_source.is_some(), plan.critic(), "has a critic"),
        ] {
            if wanted && found.is_none() {
                return Err(Error::Plan(PlanError::Plan(format!(
                    "the objective {what}, and the plan has none; make one for this configuration with \
                 `firebrick plan CONFIG --output FILE`"
                ))));
            }
        }
        Ok(plan)
    }

    /// Whether the policy is trained in the step after so many; not while the critic trains alone.
    pub fn trains_policy(&self, finished: u64) -> bool {
        finished >= self.config.critic.as_ref().map_or(0, |critic| critic.warmup)
    }

    /// The optimizer that the policy begins with.
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
    /// Of a critic with an optimizer of its own.
    pub critic: Option<LrSchedule>,
}

impl LrSchedules {
    /// Those of RL, or of supervised training by a section's settings.
    fn new(config: &RunConfig, sft: Option<&(&'static str, SftConfig)>, steps: u64) -> Result<Self> {
        let schedule = |optim: &OptimConfig| Ok::<_, Error>(optim.lr_scheduler.build(optim.lr, steps)?);
        let policy = schedule(sft.map_or(&config.optim, |(_, sft)| &sft.optim))?;
        let critic = config.own_critic().filter(|_| sft.is_none());
        let critic = critic.map(|critic| schedule(&critic.optim)).transpose()?;
        Ok(Self { policy, critic })
    }
}

/// The device of a run, which has to compute in the run's precision. A preset's values that it cannot do are given up.
fn open_device(config: &mut RunConfig) -> Result<(Device, DeviceInfo)> {
    device::allow_tf32(config.allow_tf32);
    let (device, info) = device::open(config.device)?;
    let profile = profile::of(&info);
    planning::restrict_to_device(config, &profile, Some(&info));
    config.precision.check(&device)?;
    config.rollout.precision(config.precision).check(&device)?;
    config.rollout.check_on(profile.backend, config.precision)?;
    Ok((device, info))
}
