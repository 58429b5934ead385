//! What a configuration asks for and the run's task, plans or device cannot serve: refused before anything is loaded.

use crate::config::{Mode, RunConfig, SftConfig, TrainerConfig};
use crate::data::{Prompt, PromptDataset};
use crate::executor::{check_shared_matrices, check_shared_sequences, check_stages};
use crate::objective::{Advantages, Objective};
use crate::optim::OptimConfig;
use crate::plan::{ModelPlan, MomentKind, Plan, Role};
use crate::planning;
use crate::reward::{RewardReader, architecture};
use crate::task::{Rewards, Task};
use crate::world::World;
use crate::{Error, Result};
use burn::tensor::{Device, FloatDType};
use firebrick_arch::{Arch, TensorShare};
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels;
use firebrick_backends::memory::{ReadingSource, read};
use firebrick_backends::{DeviceInfo, DeviceSpec, Precision, profile};
use firebrick_models::Tokenizer;
use firebrick_spec::Backend;
use std::sync::Arc;

/// What to do where ranks are not alike.
pub(super) const START_ALIKE: &str = "start every rank with the same program, configuration, data and kind of device";

/// Refuses a world of another size than `trainer.nnodes` and `trainer.n_gpus_per_node` say.
pub(super) fn check_size(config: &TrainerConfig, world: &World) -> Result<()> {
    let found = world.size();
    let Some(ranks) = config.ranks().filter(|&ranks| ranks != found) else {
        return Ok(());
    };
    let (nodes, gpus) = (config.nnodes.unwrap_or(1), config.n_gpus_per_node.unwrap_or(1));
    Err(Error::Ranks(format!(
        "trainer.nnodes is {nodes} and trainer.n_gpus_per_node is {gpus}, {ranks} ranks in all, and this run has \
         {found}; start it with `mpirun -n {ranks} firebrick train …` (docs/guides/multi_gpu.md), or remove both keys"
    )))
}

/// Refuses a device of which several ranks make nothing, and devices of several kinds.
pub(super) fn check_device(world: &World, asked: DeviceSpec, info: &DeviceInfo) -> Result<()> {
    if world.is_solo() {
        return Ok(());
    }
    let backend = info.device.backend();
    if backend == Backend::Cuda && asked == DeviceSpec::Auto {
        return Err(Error::Ranks(
            "`device: auto` selects the same GPU on every rank of a machine; set `device: cuda`, which gives each rank \
             of a machine a different GPU"
                .into(),
        ));
    }
    if !matches!(backend, Backend::Cpu | Backend::Cuda) {
        return Err(Error::Ranks(format!(
            "{} ranks on {}: several ranks compute on `device: cpu` or `device: cuda`; choose one of these, or start one rank",
            world.size(),
            info.device
        )));
    }
    world.same("the kind of device", START_ALIKE, format!("{backend:?}").as_bytes())
}

/// The key of how many ranks share the critic's sequences.
const CRITIC_SEQUENCES: &str = "critic.ulysses_sequence_parallel_size";

/// Refuses models whose sequences ranks cannot share as `memory.ulysses_sequence_parallel_size` says, or the critic's
/// own key.
pub(super) fn check_sequences(config: &RunConfig, policy: &Arch, critic: Option<&Arch>) -> Result<()> {
    let degree = config.memory.ulysses_sequence_parallel_size;
    let shared = ("memory.ulysses_sequence_parallel_size", degree);
    let coefficient = config.model.router_aux_loss_coef;
    check_shared_sequences("policy", policy, shared, coefficient)?;
    let Some(critic) = critic else { return Ok(()) };
    let own = config.critic_sequences();
    let shared = own.map_or(shared, |own| (CRITIC_SEQUENCES, own));
    check_shared_sequences("critic", critic, shared, 0.0)
}

/// Refuses models whose matrices ranks cannot share in training as `memory.tensor_model_parallel_size` says, and what
/// does not go with it.
pub(super) fn check_matrices(config: &RunConfig, policy: &Arch, critic: Option<&Arch>) -> Result<()> {
    let memory = &config.memory;
    let degree = memory.tensor_model_parallel_size;
    if degree <= 1 {
        return Ok(());
    }
    let refuse = |why: String| Err(Error::Ranks(format!("memory.tensor_model_parallel_size: {degree} {why}")));
    check_shared_matrices(Role::Policy, policy, degree)?;
    if let Some(critic) = critic {
        check_shared_matrices(Role::Critic, critic, degree)?;
    }
    if memory.ulysses_sequence_parallel_size > 1 {
        return refuse(format!(
            "and memory.ulysses_sequence_parallel_size: {}: ranks shard matrices or sequences, not both; set one of \
             them to 1",
            memory.ulysses_sequence_parallel_size
        ));
    }
    if let Some(own) = config.critic_sequences().filter(|&own| own > 1) {
        return refuse(format!(
            "and {CRITIC_SEQUENCES}: {own}: ranks shard matrices or sequences, not both; set one of them to 1"
        ));
    }
    let drops = config.model.lora.as_ref().and_then(|lora| lora.dropout);
    if drops.is_some_and(|share| share > 0.0) {
        return refuse(
            "shards the inputs of adapters, and each rank would drop different ones; set model.lora.dropout to 0"
                .into(),
        );
    }
    Ok(())
}

/// Prompts of each split that reward models read before the first step.
const READ: usize = 1000;

/// Refuses prompts and lengths that leave a reward model no room for a completion, where it can be foreseen. `longest`
/// are the most tokens of a prompt to the policy.
pub(in crate::trainer) fn check_reward_models(
    config: &RunConfig,
    prompts: &PromptDataset,
    tokenizer: &Arc<Tokenizer>,
    longest: usize,
) -> Result<()> {
    let models: Vec<_> = prompts.task().rewards().into_iter().flat_map(Rewards::models).collect();
    if models.is_empty() {
        return Ok(());
    }
    let drawn = prompts.spread(READ as u64)?;
    let read: Vec<&Prompt> = prompts.validation.iter().take(READ).chain(&drawn).collect();
    for (name, own) in models {
        let reader = RewardReader::open(name, own, &architecture(name, own)?, &config.memory, tokenizer)?;
        reader.check(&read, longest, config.rollout.longest_response())?;
    }
    Ok(())
}

/// Refuses models whose layers ranks cannot divide as `memory.pipeline_model_parallel_size` says, and what does not go
/// with it.
pub(super) fn check_layers(config: &RunConfig, policy: &Arch, critic: Option<&Arch>) -> Result<()> {
    let memory = &config.memory;
    let stages = memory.pipeline_model_parallel_size;
    if stages <= 1 {
        return Ok(());
    }
    check_stages(Role::Policy, policy, stages)?;
    if let Some(critic) = critic {
        check_stages(Role::Critic, critic, stages)?;
    }
    let others = [
        ("memory.tensor_model_parallel_size", memory.tensor_model_parallel_size),
        ("memory.ulysses_sequence_parallel_size", memory.ulysses_sequence_parallel_size),
        (CRITIC_SEQUENCES, config.critic_sequences().unwrap_or(1)),
        ("rollout.tensor_model_parallel_size", config.rollout.tensor_model_parallel_size),
    ];
    if let Some((key, degree)) = others.into_iter().find(|(_, degree)| *degree > 1) {
        return Err(Error::Ranks(format!(
            "memory.pipeline_model_parallel_size: {stages} and {key}: {degree}: stages have whole layers, and each rank samples by itself; \
             set one of them to 1"
        )));
    }
    Ok(())
}

/// Rejects settings that tensor-parallel sampling (`rollout.tensor_model_parallel_size`) does not support.
pub(super) fn check_sampling_groups(config: &RunConfig, policy: &Arch, task: &dyn Task) -> Result<()> {
    let rollout = &config.rollout;
    let degree = rollout.tensor_model_parallel_size;
    if degree <= 1 {
        return Ok(());
    }
    let key = format!("rollout.tensor_model_parallel_size: {degree}");
    let refuse = |why: String| Err(Error::Ranks(format!("{key} {why}")));
    if let Err(why) = TensorShare::check(policy, degree) {
        return refuse(format!("shards the policy's matrices for sampling, but {why}"));
    }
    if rollout.quantization.is_some() {
        return refuse("shards matrices only in the sampler's precision; remove rollout.quantization".into());
    }
    if let Some(setting) = rollout.asks_for_graphs() {
        return refuse(format!(
            "communicates between layers, which captured graphs do not support; remove rollout.{setting}"
        ));
    }
    if task.environments().is_some() {
        return refuse(
            "samples every completion on several ranks, and each would run the task's environments; set it to 1".into(),
        );
    }
    Ok(())
}

/// The objective of a run: one's own, or the configured one. Refuses an own one that needs a critic where the
/// configuration has none, or that has one for nothing, and a configured one that would undo what the task's rewards
/// ask for.
pub(super) fn chosen_objective(
    own: Option<Arc<dyn Objective>>,
    config: &RunConfig,
    task: &dyn Task,
) -> Result<Arc<dyn Objective>> {
    let configured = config.objective.build()?;
    let Some(own) = own else {
        let by_part = matches!(configured.advantages(), Advantages::NormalizeThenSum { .. });
        if by_part && task.rewards().is_some_and(Rewards::shapes) {
            return Err(Error::Config(
                "objective.multi_objective_aggregation: normalize_then_sum normalizes every reward in its group, \
                 regardless of `normalize` and `clip` of a reward; remove `normalize` and `clip`, or use \
                 sum_then_normalize"
                    .into(),
            ));
        }
        return Ok(Arc::new(configured));
    };
    if own.needs().values == configured.needs().values {
        return Ok(own);
    }
    Err(Error::Config(
        "the objective that was passed in and the `objective` section disagree about a critic; use `objective: ppo` with one \
         that needs values, and another with one that does not"
            .into(),
    ))
}

/// Refuses reward models that are none, before anything is loaded.
pub(super) fn check_rewards(task: &dyn Task) -> Result<()> {
    let models = task.rewards().into_iter().flat_map(Rewards::models);
    for (name, model) in models {
        architecture(name, model)?;
    }
    Ok(())
}

/// Refuses optimizers that a run's plans or device cannot serve.
pub(super) fn check_optimizers(
    config: &RunConfig,
    sft: Option<&(&'static str, SftConfig)>,
    mode: Mode,
    plan: &Plan,
    device: &Device,
) -> Result<()> {
    for (section, optim) in optimizers(config, sft, mode) {
        check_optimizer(plan.policy(), device, config.precision, optim, &section)?;
    }
    match (config.own_critic(), plan.critic()) {
        (Some(critic), Some(plan)) if mode == Mode::Rl => {
            check_optimizer(plan, device, config.precision, &critic.optim, "critic.optim")
        }
        _ => Ok(()),
    }
}

/// Refuses an optimizer that the plan or the device cannot serve, and warns of one that will not do what it says.
fn check_optimizer(
    plan: &ModelPlan,
    device: &Device,
    precision: Precision,
    optim: &OptimConfig,
    section: &str,
) -> Result<()> {
    planning::check_optimizer(plan, optim, precision, section)?;
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
            "bf16 second moments cannot shrink if {section}.betas[1] is above 0.99 (it is {}): steps get smaller than \
             they should; memory.moments: block8 saves more memory and does not have this problem",
            optim.betas[1]
        );
    }
    Ok(())
}

/// Rejects `memory.limit` on a device that does not report memory use.
pub(super) fn check_limit(config: &RunConfig, device: &Device) -> Result<()> {
    if config.memory.limit.is_some() && read(device).source == ReadingSource::None {
        return Err(Error::Config(
            "memory.limit requires a backend that reports memory use, and this program does not count its heap: make \
             firebrick::backends::allocator::CountingAllocator its global allocator"
                .into(),
        ));
    }
    Ok(())
}

/// Says where sampling in 8 bits moves more bytes than it saves.
pub(super) fn check_quantised(config: &RunConfig, mode: Mode, plan: &Plan, info: &DeviceInfo) {
    let (rollout, backend) = (&config.rollout, profile::of(info).backend);
    let half = rollout.precision(config.precision).is_half();
    let few = kernels::table(backend).quantized(half).max_fused_rows;
    let prompts = config.trainer.train_batch_size;
    let together = rollout.dynamic_sampling.prompts(prompts) * rollout.n;
    let most = plan.rollout.max_num_seqs.min(together);
    if mode == Mode::Rl && rollout.quantization.is_some() && most > few {
        tracing::warn!(
            "rollout.quantization: int8 with {most} sequences at a time: above {few} every token dequantizes whole \
             matrices on {}, which moves more bytes than the weights have; set rollout.max_num_seqs: {few}, or remove \
             the key",
            backend.name()
        );
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
