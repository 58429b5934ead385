//! Checks of a configuration against the run's task, plan and device, before anything is loaded.

use super::Session;
use crate::config::{Mode, RunConfig, TrainerConfig};
use crate::data::{Prompt, PromptDataset};
use crate::executor::{check_shared_matrices, check_shared_sequences, check_stages};
use crate::objective::{Advantages, Objective};
use crate::optim::OptimConfig;
use crate::plan::{ModelPlan, MomentKind, Plan, Role};
use crate::reward::{RewardReader, architecture};
use crate::task::{Rewards, Task};
use crate::world::World;
use crate::{Error, Result};
use burn::tensor::FloatDType;
use firebrick_arch::{Arch, TensorShare};
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels;
use firebrick_backends::memory::{ReadingSource, read};
use firebrick_backends::{DeviceInfo, DeviceSpec, profile};
use firebrick_models::Tokenizer;
use firebrick_spec::Backend;
use std::sync::Arc;

/// Advice if ranks differ.
pub(super) const START_ALIKE: &str = "start every rank with the same program, configuration, data and kind of device";

/// Rejects a number of ranks that differs from `trainer.nnodes` · `trainer.n_gpus_per_node`.
pub(super) fn check_size(config: &TrainerConfig, world: &World) -> Result<()> {
    let size = world.size();
    let Some(ranks) = config.ranks().filter(|&ranks| ranks != size) else {
        return Ok(());
    };
    let (nodes, gpus) = (config.nnodes.unwrap_or(1), config.n_gpus_per_node.unwrap_or(1));
    Err(Error::Ranks(format!(
        "trainer.nnodes is {nodes} and trainer.n_gpus_per_node is {gpus}, {ranks} ranks in all, and this run has \
         {size}; start it with `mpirun -n {ranks} firebrick train …` (docs/guides/multi_gpu.md), or remove both keys"
    )))
}

/// Rejects a device that does not support several ranks, and devices of several kinds.
pub(super) fn check_device(world: &World, spec: DeviceSpec, info: &DeviceInfo) -> Result<()> {
    if world.is_solo() {
        return Ok(());
    }
    let backend = info.device.backend();
    if backend == Backend::Cuda && spec == DeviceSpec::Auto {
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

const POLICY_SEQUENCES: &str = "memory.ulysses_sequence_parallel_size";
const CRITIC_SEQUENCES: &str = "critic.ulysses_sequence_parallel_size";

/// Rejects models and settings that Ulysses, tensor and pipeline parallelism do not support.
pub(super) fn check_parallel_training(config: &RunConfig, policy: &Arch, critic: Option<&Arch>) -> Result<()> {
    let memory = &config.memory;
    let sequences = (POLICY_SEQUENCES, memory.ulysses_sequence_parallel_size);
    let critic_sequences = config.critic_sequences().map(|degree| (CRITIC_SEQUENCES, degree));
    check_shared_sequences("policy", policy, sequences, config.model.router_aux_loss_coef)?;
    if let Some(critic) = critic {
        check_shared_sequences("critic", critic, critic_sequences.unwrap_or(sequences), 0.0)?;
    }
    let models = || std::iter::once((Role::Policy, policy)).chain(critic.map(|critic| (Role::Critic, critic)));
    let is_set = |(_, degree): &(&str, usize)| *degree > 1;
    let (tensor, stages) = (memory.tensor_model_parallel_size, memory.pipeline_model_parallel_size);
    if tensor > 1 {
        models().try_for_each(|(role, arch)| check_shared_matrices(role, arch, tensor))?;
        let refuse = |why: String| Err(Error::Ranks(format!("memory.tensor_model_parallel_size: {tensor} {why}")));
        if let Some((key, degree)) = std::iter::once(sequences).chain(critic_sequences).find(is_set) {
            return refuse(format!(
                "and {key}: {degree}: ranks shard matrices or sequences, not both; set one of them to 1"
            ));
        }
        let dropout = config.model.lora.as_ref().and_then(|lora| lora.dropout);
        if dropout.is_some_and(|rate| rate > 0.0) {
            return refuse(
                "shards the inputs of adapters, and each rank would drop different ones; set model.lora.dropout to 0"
                    .into(),
            );
        }
    }
    if stages > 1 {
        models().try_for_each(|(role, arch)| check_stages(role, arch, stages))?;
        let others = [
            ("memory.tensor_model_parallel_size", tensor),
            sequences,
            critic_sequences.unwrap_or((CRITIC_SEQUENCES, 1)),
            ("rollout.tensor_model_parallel_size", config.rollout.tensor_model_parallel_size),
        ];
        if let Some((key, degree)) = others.into_iter().find(is_set) {
            return Err(Error::Ranks(format!(
                "memory.pipeline_model_parallel_size: {stages} and {key}: {degree}: stages have whole layers, and each \
                 rank samples by itself; set one of them to 1"
            )));
        }
    }
    Ok(())
}

/// Prompts of each split that are checked with reward models before the first step.
const MAX_CHECKED: usize = 1000;

/// Rejects prompts and lengths that leave a reward model no room for a completion, as far as it can be foreseen.
/// `longest` is the maximum number of prompt tokens of the policy.
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
    let drawn = prompts.spread(MAX_CHECKED as u64)?;
    let checked: Vec<&Prompt> = prompts.validation.iter().take(MAX_CHECKED).chain(&drawn).collect();
    for (name, model) in models {
        let reader = RewardReader::open(name, model, &architecture(name, model)?, &config.memory, tokenizer)?;
        reader.check(&checked, longest, config.rollout.longest_response())?;
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
    if let Some(setting) = rollout.requires_graphs() {
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

/// The custom objective of a run, or the configured one. Rejects a custom one that disagrees with the configuration
/// about a critic, and a configured one that would undo the normalization of rewards.
pub(super) fn select_objective(
    custom: Option<Arc<dyn Objective>>,
    config: &RunConfig,
    task: &dyn Task,
) -> Result<Arc<dyn Objective>> {
    let configured = config.objective.build()?;
    let Some(custom) = custom else {
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
    if custom.needs().values == configured.needs().values {
        return Ok(custom);
    }
    Err(Error::Config(
        "the objective that was passed in and the `objective` section disagree about a critic; use `objective: ppo` with one \
         that needs values, and another with one that does not"
            .into(),
    ))
}

/// Rejects checkpoints that are not reward models.
pub(super) fn check_rewards(task: &dyn Task) -> Result<()> {
    let mut models = task.rewards().into_iter().flat_map(Rewards::models);
    models.try_for_each(|(name, model)| architecture(name, model).map(drop))
}

/// Rejects optimizers that the run's plan or device does not support.
pub(super) fn check_optimizers(session: &Session, plan: &Plan) -> Result<()> {
    let (config, policy) = (&session.config, plan.policy());
    let sft = session.sft.iter().map(|(section, sft)| (format!("{section}.optim"), &sft.optim, policy));
    let mut optimizers: Vec<_> = sft.collect();
    if session.mode == Mode::Rl {
        optimizers.push(("optim".to_owned(), &config.optim, policy));
        let critic = config.own_critic().zip(plan.critic());
        optimizers.extend(critic.map(|(critic, plan)| ("critic.optim".to_owned(), &critic.optim, plan)));
    }
    optimizers.iter().try_for_each(|(section, optim, plan)| check_optimizer(session, plan, optim, section))
}

/// Rejects an optimizer that the plan or the device does not support, and warns of bf16 moments that cannot shrink.
fn check_optimizer(session: &Session, plan: &ModelPlan, optim: &OptimConfig, section: &str) -> Result<()> {
    if plan.optimizer.in_backward && optim.scaler(session.config.precision).is_some() {
        return Err(Error::Config(format!(
            "memory.step_in_backward updates segments before all gradients are known to be finite, which a loss scale \
             needs (f16 has one by itself): use precision: bf16, set {section}.loss_scale to nothing in other precisions, \
             or leave step_in_backward off"
        )));
    }
    if plan.optimizer.in_backward && optim.clip_grad.is_some() {
        return Err(Error::Config(format!(
            "memory.step_in_backward updates segments before the gradient's global norm is known, so it cannot be \
             clipped: set {section}.clip_grad: null, or leave step_in_backward off"
        )));
    }
    if plan.optimizer.moments != MomentKind::Bf16 {
        return Ok(());
    }
    if plan.optimizer.home == Home::Device && !session.device.supports_dtype(FloatDType::BF16) {
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
pub(super) fn check_limit(session: &Session) -> Result<()> {
    if session.config.memory.limit.is_some() && read(&session.device).source == ReadingSource::None {
        return Err(Error::Config(
            "memory.limit requires a backend that reports memory use, and this program does not count its heap: make \
             firebrick::backends::allocator::CountingAllocator its global allocator"
                .into(),
        ));
    }
    Ok(())
}

/// Warns if quantized sampling moves more bytes than it saves.
pub(super) fn check_quantized(session: &Session, plan: &Plan) {
    let (config, backend) = (&session.config, profile::of(&session.info).backend);
    let rollout = &config.rollout;
    let half = rollout.precision(config.precision).is_half();
    let fused = kernels::table(backend).quantized(half).max_fused_rows;
    let sequences = rollout.dynamic_sampling.prompts(config.trainer.train_batch_size) * rollout.n;
    let running = plan.rollout.max_num_seqs.min(sequences);
    if session.mode == Mode::Rl && rollout.quantization.is_some() && running > fused {
        tracing::warn!(
            "rollout.quantization: int8 with {running} sequences at a time: above {fused} every token dequantizes whole \
             matrices on {}, which moves more bytes than the weights have; set rollout.max_num_seqs: {fused}, or remove \
             the key",
            backend.name()
        );
    }
}
