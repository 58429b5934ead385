//! Workload of a configuration and its data, for the planner.

use crate::checkpoint::critic_architecture;
use crate::config::{Matmul, OldLogProbs, RunConfig, SftConfig};
use crate::data::DatasetStats;
use crate::objective::{Needs, Objective};
use crate::reward;
use crate::task::{Rewards, TaskConfig};
use crate::{Error, Result};
use firebrick_arch::Arch;
use firebrick_backends::device::Backend;
use firebrick_plan::Plan;
use firebrick_plan::estimate::{CriticWork, Examples, RewardWork, WarmUp, Workload};

/// The workload of a configuration.
pub(super) fn rl_workload(config: &RunConfig, arch: &Arch, backend: Backend) -> Result<Workload> {
    let needs = config.objective.build()?.needs();
    config.rollout.check_for(arch)?;
    config.check_exact_for(arch)?;
    config.model.check_for(arch)?;
    let lora = config.model.lora.as_ref();
    let lora = lora.map(|lora| lora.shape(arch)).transpose()?;
    let compares = needs.reference;
    let prompts = config.trainer.train_batch_size as u64;
    let shared = config.shared_critic().is_some();
    Ok(Workload {
        arch: if shared { arch.clone().with_joint_value_head() } else { arch.clone() },
        prompt_length: config.rollout.prompt_length as u64,
        response_length: config.rollout.longest_response() as u64,
        // known once a step is sampled
        mean_lengths: None,
        prompts,
        group: config.rollout.n as u64,
        greedy: needs.greedy,
        mini_batch: config.update.ppo_mini_batch_size.map_or(prompts, |n| n as u64),
        epochs: config.update.ppo_epochs as u64,
        max_num_batched_tokens: config.rollout.max_num_batched_tokens as u64,
        kv_cache_bytes: config.rollout.kv_cache_memory_bytes.map(|bytes| bytes.0),
        kv_cache_dtype: config.rollout.kv_cache_dtype,
        prepack: config.prepack(),
        cuda_graphs: config.rollout.cuda_graphs(),
        cublaslt: config.matmul == Matmul::Cublaslt,
        validation: config.trainer.val_max_samples.map_or(u64::MAX, |n| n as u64),
        reference: compares && lora.is_none(),
        adapters_off: compares && lora.is_some(),
        lora,
        // values of a shared trunk come out of the same pass
        old_log_probs: shared || config.old_log_probs(backend, arch) == OldLogProbs::Trainer,
        entropy: needs.entropy,
        scores: needs.scores,
        clips: config.optim.clip_grad.is_some(),
        scales_loss: config.scales_loss(),
        rollout_precision: config.rollout.precision(config.precision),
        critic: config
            .own_critic()
            .map(|critic| {
                Ok::<_, Error>(CriticWork {
                    arch: critic_architecture(critic, arch)?,
                    clips: critic.optim.clip_grad.is_some(),
                    starts_from_policy: critic.model.path.is_none(),
                })
            })
            .transpose()?,
        rewards: match config.task.as_ref().and_then(TaskConfig::rows) {
            // with an environment alone there is none
            Some(rows) if !rows.rewards.is_empty() => reward_work(&Rewards::new(&rows.rewards)?, config)?,
            _ => Vec::new(),
        },
        examples: None,
        // known once they are read
        rows_bytes: 0,
        saves_beside: config.trainer.save_freq > 0,
        // of a section that not every mode has
        warm_up: None,
    })
}

/// Sets the needs of a custom objective.
pub fn set_needs(workload: &mut Workload, needs: Needs) {
    workload.greedy = needs.greedy;
    workload.entropy = needs.entropy;
    workload.scores = needs.scores;
    // with adapters, the reference is the model without them
    let adapters = workload.lora.is_some();
    workload.reference = needs.reference && !adapters;
    workload.adapters_off = needs.reference && adapters;
}

/// Workload of supervised training as the warm-up of a run.
pub(super) fn warm_up(config: &RunConfig, sft: &SftConfig, arch: &Arch) -> WarmUp {
    WarmUp {
        batch: sft.batch_size as u64,
        length: longest_example(sft, arch),
        clips: sft.optim.clip_grad.is_some(),
        scales_loss: sft.optim.scaler(config.precision).is_some(),
    }
}

/// Maximum tokens of an example, before any is read.
fn longest_example(sft: &SftConfig, arch: &Arch) -> u64 {
    let context = arch.context().unwrap_or(arch.max_positions);
    sft.max_length.unwrap_or(context).min(context) as u64
}

/// Workload of supervised training with a section's settings: steps over examples, and validation.
pub(super) fn sft_workload(config: &RunConfig, sft: &SftConfig, arch: &Arch, backend: Backend) -> Result<Workload> {
    let batch = sft.batch_size as u64;
    let samples = config.task.is_some();
    let rl = rl_workload(config, arch, backend)?;
    Ok(Workload {
        prompts: batch,
        group: 1,
        greedy: false,
        arch: arch.clone(),
        mini_batch: batch,
        epochs: 1,
        validation: if samples { rl.validation } else { 0 },
        reference: false,
        adapters_off: false,
        old_log_probs: false,
        entropy: false,
        scores: false,
        clips: sft.optim.clip_grad.is_some(),
        scales_loss: sft.optim.scaler(config.precision).is_some(),
        critic: None,
        saves_beside: false,
        examples: Some(Examples {
            length: longest_example(sft, arch),
            validation: u64::from(samples || sft.validation.is_some()) * u64::MAX,
        }),
        ..rl
    })
}

/// Workload of the reward models on the run's device.
///
/// # Errors
/// `Error::Config` for a checkpoint that is not a reward model, `Error::Hub` if it cannot be fetched; those of its
/// plan.
pub fn reward_work(rewards: &Rewards, config: &RunConfig) -> Result<Vec<RewardWork>> {
    let models = rewards.models().filter(|(_, model)| model.device.is_none_or(|device| device == config.device));
    let work = models.map(|(name, model)| {
        let arch = reward::architecture(name, model)?.in_precision(config.precision);
        let plan = config.memory.scorer_plan(&arch, model.score_tokens, model.param_offload)?;
        Ok(RewardWork { arch, plan })
    });
    work.collect()
}

/// Sets a workload's lengths and counts to those of prompts and examples. The lengths are bounds: no sequence of the
/// run is longer.
pub fn observe(workload: &mut Workload, stats: DatasetStats) {
    workload.prompt_length = workload.prompt_length.min(stats.longest_prompt as u64);
    workload.validation = stats.validation as u64;
    workload.rows_bytes = stats.rows_bytes;
    if let Some(stats) = stats.demonstrations {
        let length = stats.longest as u64;
        match (&mut workload.examples, &mut workload.warm_up) {
            (Some(examples), _) => *examples = Examples { length, validation: stats.validation as u64 },
            (None, Some(warm_up)) => warm_up.length = length,
            (None, None) => {}
        }
    }
}

/// Rejects a plan under which the longest sequence of a workload fits into no micro-batch.
///
/// # Errors
/// `Error::Budget` with the too small key, or `Error::Plan` for a plan that was read from a file.
pub fn check_longest(plan: &Plan, workload: &Workload, from_file: bool) -> Result<()> {
    let scored = workload.scored_length() as usize;
    let trained = workload.longest_pass() as usize;
    let policy = plan.policy();
    let scores = |used: bool| if used { scored } else { 0 };
    let mut limits = vec![
        ("memory.train_tokens", policy.train_tokens, trained),
        ("memory.score_tokens", policy.score_tokens, scores(workload.policy_scores())),
    ];
    if let Some(reference) = plan.reference() {
        limits.push(("memory.score_tokens", reference.score_tokens, scores(workload.reference)));
    }
    if let Some(critic) = plan.critic().filter(|_| workload.critic.is_some()) {
        limits.push(("memory.critic.train_tokens", critic.train_tokens, scored));
        limits.push(("memory.critic.score_tokens", critic.score_tokens, scored));
    }
    let Some((key, budget, tokens)) = limits.into_iter().find(|(_, budget, tokens)| budget < tokens) else {
        return Ok(());
    };
    if from_file {
        return Err(Error::Plan(firebrick_plan::Error::Plan(format!(
            "it is for sequences of at most {budget} tokens ({key}), and this run has sequences of up to {tokens}; make \
             one for this configuration with `firebrick plan CONFIG --output FILE`"
        ))));
    }
    Err(Error::Budget { tokens, budget, key })
}
