//! verl's `actor_rollout_ref.actor`.

use super::data::prompts;
use super::loss::{aggregation, clip, dual_clip, entropy, kl_part, kl_switch, loss_scale, policy_loss};
use super::offload::{
    cpu_optimizer, fraction, grads, granularity, layers, masters, method, narrow_moments, overlap, params, shards,
    state, streamed,
};
use super::optimizer::{cycles, min_lr, optimizer, schedule, warmup_ratio, warmup_steps};
use super::version::is_before_0_4;
use crate::common::{built_in, devices, precision, shared_sequences, size, training_groups, training_stages};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, set, set_noted};
use serde_json::Value;

pub(super) const ONE_EXECUTOR: &str = "one executor runs every plan: there is no wrapper to choose";
pub(super) const PROFILER: &str = "`firebrick train CONFIG --profile N` writes a trace of N steps for Perfetto";
pub(super) const KERNELS: &str = "kernels are compiled by the backend";
pub(super) const CHUNKS: &str =
    "log-probs and entropy come from chunks of memory.head_rows rows, and nothing of them is kept";

pub(super) const TABLE: &[KeyRule] = &[
    ("actor_rollout_ref.actor.strategy", NotNeeded(ONE_EXECUTOR)),
    ("actor_rollout_ref.actor.rollout_n", NotNeeded("set by rollout.n")),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", By(mini_batch)),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", By(|a| micro_batch(a, 1))),
    ("actor_rollout_ref.actor.ppo_micro_batch_size", By(global_micro_batch)),
    (
        "actor_rollout_ref.actor.use_dynamic_bsz",
        NotNeeded("micro-batches are always packed by tokens (memory.train_tokens)"),
    ),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", By(train_tokens)),
    ("actor_rollout_ref.actor.ppo_epochs", Same("update.ppo_epochs")),
    ("actor_rollout_ref.actor.shuffle", By(shuffle)),
    (
        "actor_rollout_ref.actor.data_loader_seed",
        NotNeeded("mini-batches are not shuffled; trainer.seed seeds everything"),
    ),
    ("actor_rollout_ref.actor.clip_ratio", By(clip_ratio)),
    ("actor_rollout_ref.actor.clip_ratio_low", By(|a| clip(a, "clip_ratio_low"))),
    ("actor_rollout_ref.actor.clip_ratio_high", By(|a| clip(a, "clip_ratio_high"))),
    ("actor_rollout_ref.actor.clip_ratio_c", By(dual_clip)),
    ("actor_rollout_ref.actor.tau_pos", Same("objective.tau_pos")),
    ("actor_rollout_ref.actor.tau_neg", Same("objective.tau_neg")),
    ("actor_rollout_ref.actor.policy_loss.loss_mode", By(policy_loss)),
    ("actor_rollout_ref.actor.policy_loss.tau_pos", Same("objective.tau_pos")),
    ("actor_rollout_ref.actor.policy_loss.tau_neg", Same("objective.tau_neg")),
    ("actor_rollout_ref.actor.policy_loss.clip_cov_ratio", Same("objective.clip_cov_ratio")),
    ("actor_rollout_ref.actor.policy_loss.clip_cov_lb", Same("objective.clip_cov_lb")),
    ("actor_rollout_ref.actor.policy_loss.clip_cov_ub", Same("objective.clip_cov_ub")),
    ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio", Same("objective.kl_cov_ratio")),
    ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef", Same("objective.ppo_kl_coef")),
    ("actor_rollout_ref.actor.loss_agg_mode", By(aggregation)),
    ("actor_rollout_ref.actor.loss_scale_factor", By(loss_scale)),
    ("actor_rollout_ref.actor.entropy_coeff", By(entropy)),
    ("actor_rollout_ref.actor.calculate_entropy", NotNeeded("the entropy is always reported")),
    ("actor_rollout_ref.actor.use_kl_loss", By(kl_switch)),
    ("actor_rollout_ref.actor.kl_loss_coef", By(|a| kl_part(a, "objective.kl_loss_coef"))),
    ("actor_rollout_ref.actor.kl_loss_type", By(|a| kl_part(a, "objective.kl_loss_type"))),
    ("actor_rollout_ref.actor.use_prefix_grouper", NotNeeded("the prompt of a group is run once while sampling")),
    ("actor_rollout_ref.actor.use_torch_compile", NotNeeded(KERNELS)),
    ("actor_rollout_ref.actor.use_fused_kernels", NotNeeded("norms, attention and the head are fused kernels")),
    ("actor_rollout_ref.actor.use_remove_padding", NotNeeded("rows are packed without padding by default")),
    (SHARED, By(shared_sequences)),
    (FSDP_SHARED, By(shared_sequences)),
    // as other engines call it
    ("actor_rollout_ref.actor.megatron.context_parallel_size", By(shared_sequences)),
    ("actor_rollout_ref.actor.entropy_from_logits_with_chunking", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.actor.entropy_checkpointing", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.actor.calculate_sum_pi_squared", NotNeeded(SQUARES)),
    ("actor_rollout_ref.actor.sum_pi_squared_checkpointing", NotNeeded(SQUARES)),
    ("actor_rollout_ref.actor.entropy_from_logits_chunk_size", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.actor.pad_to_length", NotNeeded("rows are packed without padding by default")),
    ("actor_rollout_ref.actor.tis_imp_ratio_cap", By(truncated)),
    ("actor_rollout_ref.actor.qat.enable", Off(NO_QAT)),
    ("actor_rollout_ref.actor.fsdp_config.qat.enable", Off(NO_QAT)),
    ("actor_rollout_ref.actor.megatron.qat.enable", Off(NO_QAT)),
    ("actor_rollout_ref.actor.policy_loss.dro_beta", Off("docs/guides/algorithms.md lists the losses")),
    ("actor_rollout_ref.actor.optim.zero_indexed_step", By(first_step)),
    ("actor_rollout_ref.actor.qat.**", NotNeeded("qat.enable controls whether weights are quantized in training")),
    ("actor_rollout_ref.actor.state_masking", NotNeeded("what a tool answers is never trained on")),
    ("actor_rollout_ref.actor.use_token_level_loss", By(token_level)),
    ("actor_rollout_ref.actor.freeze_vision_tower", NotNeeded("models read only text")),
    ("actor_rollout_ref.actor.grad_clip", Same("optim.clip_grad")),
    ("actor_rollout_ref.actor.checkpoint.**", NotNeeded("a checkpoint has the model and all that --resume needs")),
    ("actor_rollout_ref.actor.profiler.**", NotNeeded(PROFILER)),
    ("actor_rollout_ref.actor.profile.**", NotNeeded(PROFILER)),
    (
        "actor_rollout_ref.actor.router_replay.**",
        Off("routes are replayed from the rollout, not from files: rollout.router_replay"),
    ),
    ("actor_rollout_ref.actor.router_replay._target_", NotNeeded("a class of verl's")),
    ("actor_rollout_ref.actor.router_replay.mode", By(replay)),
    (
        "actor_rollout_ref.actor.optim.**",
        Off("AdamW on gradients clipped by their global norm is the optimizer; its keys are under `optim`"),
    ),
    ("actor_rollout_ref.actor.optim.lr", Same("optim.lr")),
    ("actor_rollout_ref.actor.optim.betas", Same("optim.betas")),
    ("actor_rollout_ref.actor.optim.weight_decay", Same("optim.weight_decay")),
    ("actor_rollout_ref.actor.optim.clip_grad", Same("optim.clip_grad")),
    ("actor_rollout_ref.actor.optim.eps", Same("optim.eps")),
    ("actor_rollout_ref.actor.optim.optimizer", By(optimizer)),
    ("actor_rollout_ref.actor.optim.optimizer_impl", By(optimizer)),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps", By(|a| warmup_steps(a, "optim"))),
    ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", By(|a| warmup_ratio(a, "optim"))),
    ("actor_rollout_ref.actor.optim.lr_scheduler_type", By(|a| schedule(a, "optim"))),
    ("actor_rollout_ref.actor.optim.warmup_style", By(|a| schedule(a, "optim"))),
    ("actor_rollout_ref.actor.optim.lr_decay_style", By(|a| schedule(a, "optim"))),
    ("actor_rollout_ref.actor.optim.min_lr_ratio", By(|a| min_lr(a, "optim"))),
    ("actor_rollout_ref.actor.optim.num_cycles", By(|a| cycles(a, "optim"))),
    (
        "actor_rollout_ref.actor.optim.total_training_steps",
        NotNeeded("verl fills it in with the run's steps; the schedule here is over trainer.steps"),
    ),
    ("actor_rollout_ref.actor.optim.lr_decay_steps", NotNeeded("the schedule is over trainer.steps")),
    ("actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload", By(cpu_optimizer)),
    ("actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction", By(fraction)),
    ("actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d", By(overlap)),
    ("actor_rollout_ref.actor.optim.override_optimizer_config.use_precision_aware_optimizer", By(narrow_moments)),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", By(params)),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", By(state)),
    ("actor_rollout_ref.actor.fsdp_config.offload_policy", By(streamed)),
    ("actor_rollout_ref.actor.fsdp_config.cpu_offload", By(streamed)),
    ("actor_rollout_ref.actor.fsdp_config.offload_params", By(streamed)),
    (
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward",
        NotNeeded(
            "one rank has nothing to shard; on several, memory.zero_stage: 3 shards weights, and \
             memory.reshard_after_forward is this setting",
        ),
    ),
    ("actor_rollout_ref.actor.fsdp_config.fsdp_size", By(shards)),
    ("actor_rollout_ref.actor.fsdp_config.dtype", By(precision)),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype", By(masters)),
    ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", By(precision)),
    ("actor_rollout_ref.actor.fsdp_config.seed", NotNeeded("trainer.seed seeds everything")),
    (
        "actor_rollout_ref.actor.fsdp_config.forward_prefetch",
        NotNeeded("memory.prefetch sets the number of copies in flight"),
    ),
    (
        "actor_rollout_ref.actor.fsdp_config.full_determinism",
        By(|a| built_in(a, "a run repeats to the bit unless deterministic: false")),
    ),
    ("actor_rollout_ref.actor.fsdp_config.**", NotNeeded(ONE_EXECUTOR)),
    ("actor_rollout_ref.actor.megatron.param_offload", By(params)),
    ("actor_rollout_ref.actor.megatron.grad_offload", By(grads)),
    ("actor_rollout_ref.actor.megatron.optimizer_offload", By(state)),
    ("actor_rollout_ref.actor.megatron.dtype", By(precision)),
    ("actor_rollout_ref.actor.megatron.seed", NotNeeded("trainer.seed seeds everything")),
    (TENSOR, By(training_groups)),
    (STAGES, By(training_stages)),
    ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size", By(devices)),
    ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", By(devices)),
    ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size", By(devices)),
    ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity", By(granularity)),
    ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method", By(method)),
    ("actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers", By(layers)),
    (
        "actor_rollout_ref.actor.megatron.override_transformer_config.**",
        NotNeeded("it chooses Megatron's kernels and parts; ours are built in"),
    ),
    ("actor_rollout_ref.actor.megatron.**", NotNeeded(ONE_EXECUTOR)),
];

const NO_QAT: &str = "weights are trained as they are, without quantization";
const SQUARES: &str = "no estimator here needs the sum of squared probabilities";

/// Whether a warm-up begins at 0.
pub(super) fn first_step(asked: &SourceKey) -> MappedKey {
    if asked.is_off() && !asked.is_absent() {
        return cannot("a warm-up begins at 0: the rate of the first step is that of no step");
    }
    not_needed("schedules count steps from 0, as here")
}

/// The order of mini-batches, of which a step may have one.
fn shuffle(asked: &SourceKey) -> MappedKey {
    let mini = asked.facts.whole("actor_rollout_ref.actor.ppo_mini_batch_size").unwrap_or(256);
    if !asked.is_on() {
        return not_needed("off, as here");
    }
    if prompts(asked.facts) <= mini {
        return not_needed("a step has one mini-batch");
    }
    cannot("mini-batches are taken in the order of the step's prompts")
}

/// Truncated importance weights of 2025.
fn truncated(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(cap) if cap > 0.0 => MappedKey::Set(
            vec![
                ("objective.rollout_is".into(), "token_truncate".into()),
                ("objective.rollout_is_threshold".into(), cap.into()),
            ],
            String::new(),
        ),
        _ if asked.is_off() => not_needed("off, as here by default"),
        _ => asked.wrong("a number"),
    }
}

/// `DeepScaleR`'s switch.
fn token_level(asked: &SourceKey) -> MappedKey {
    set("objective.loss_agg_mode", if asked.is_on() { "token-mean" } else { "seq-mean-token-mean" })
}

/// Prompts an optimizer step, in both engines.
fn mini_batch(asked: &SourceKey) -> MappedKey {
    let prompts = prompts(asked.facts);
    match asked.whole() {
        Some(mini) if mini > 0 && mini <= prompts && prompts % mini == 0 => set("update.ppo_mini_batch_size", mini),
        Some(mini) if mini > 0 => cannot(format!(
            "update.ppo_mini_batch_size has to divide trainer.train_batch_size, and {prompts} is no multiple of {mini}; without it \
             all prompts make one optimizer step"
        )),
        _ => asked.wrong("a number of prompts"),
    }
}

fn micro_batch(asked: &SourceKey, devices: i64) -> MappedKey {
    if asked.facts.is_on("actor_rollout_ref.actor.use_dynamic_bsz") {
        return not_needed("use_dynamic_bsz: tokens bound a micro-batch");
    }
    match asked.whole() {
        Some(n) if n > 0 => set_noted(
            "memory.micro_batch_size",
            (n / devices).max(1),
            "sequences; without it only memory.train_tokens splits a step into micro-batches, with the same results",
        ),
        _ if asked.is_off() => not_needed("has no value in the files"),
        _ => asked.wrong("a number of sequences"),
    }
}

/// `R3` takes routes from the rollout, `R2` from the old log-probs' pass.
fn replay(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("R3") => set("rollout.router_replay", true),
        Some("R2") => cannot("routes are replayed from the rollout: rollout.router_replay"),
        _ if asked.is_off() => not_needed("off, as here by default"),
        _ => asked.wrong("disabled, R2 or R3"),
    }
}

/// The older key counts the sequences of all devices.
fn global_micro_batch(asked: &SourceKey) -> MappedKey {
    let count = |key| asked.facts.whole(key).unwrap_or(1).max(1);
    micro_batch(asked, count("trainer.n_gpus_per_node") * count("trainer.nnodes"))
}

fn train_tokens(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("actor_rollout_ref.actor.use_dynamic_bsz").is_some()
        && !asked.facts.is_on("actor_rollout_ref.actor.use_dynamic_bsz")
    {
        return not_needed("use_dynamic_bsz is off: verl does not read it");
    }
    tokens_of_ranks(asked, "memory.train_tokens", policy_sharing(asked))
}

/// The same of the reference: it has the policy's.
pub(super) fn same_shared_sequences(asked: &SourceKey) -> MappedKey {
    let policy = policy_sharing(asked);
    match asked.whole().map_or(1, |n| n.max(1)) {
        n if n == policy => not_needed("policy and reference have the same"),
        n => not_needed(format!(
            "policy and reference shard sequences over the same ranks, with the same results: {SHARED} is {policy} and \
             this is {n}, and the former applies (memory.ulysses_sequence_parallel_size)"
        )),
    }
}

/// The policy's key of ranks that share matrices.
pub(super) const TENSOR: &str = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size";

/// The policy's key of stages.
pub(super) const STAGES: &str = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size";

/// The policy's key.
const SHARED: &str = "actor_rollout_ref.actor.ulysses_sequence_parallel_size";

/// The same since 2026.
const FSDP_SHARED: &str = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size";

/// Ranks that share the policy's sequences.
pub(super) fn policy_sharing(asked: &SourceKey) -> i64 {
    let keys = [SHARED, FSDP_SHARED, "actor_rollout_ref.actor.megatron.context_parallel_size"];
    keys.iter().filter_map(|key| asked.facts.whole(key)).max().unwrap_or(1).max(1)
}

/// Most tokens of a micro-batch that so many ranks share, of which the source counts those of one.
pub(super) fn tokens_of_ranks(asked: &SourceKey, key: &str, ranks: i64) -> MappedKey {
    match (asked.whole(), ranks) {
        (Some(n), ranks) if n > 0 && ranks > 1 => {
            set_noted(key, n * ranks, format!("{n} on each of the {ranks} ranks that share a micro-batch"))
        }
        _ => size(asked, key),
    }
}

/// The ε on both sides, which recent verl reads only where those of each side are null.
fn clip_ratio(asked: &SourceKey) -> MappedKey {
    let sides = ["actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high"];
    let given = |side: &str| asked.facts.is_written(side) && asked.facts.number(side).is_some_and(|ratio| ratio >= 0.0);
    if sides.iter().all(|side| given(side)) {
        return not_needed("clip_ratio_low and clip_ratio_high are given");
    }
    let Some(ratio) = asked.number() else {
        return asked.wrong("a number");
    };
    let ours = ["objective.clip_ratio_low", "objective.clip_ratio_high"];
    let set = sides.iter().zip(ours).filter(|(theirs, _)| !given(theirs));
    let set = set.map(|(_, ours)| (ours.to_owned(), Value::from(ratio)));
    let note = if is_before_0_4(asked.facts) {
        ""
    } else {
        "verl since 0.4 reads clip_ratio_low and clip_ratio_high instead, which are 0.2 there"
    };
    MappedKey::Set(set.collect(), note.into())
}
