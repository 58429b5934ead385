//! verl's `actor_rollout_ref.actor` and `ref`: batches, the ranks of a model, where its state is kept.

use super::data::prompts;
use super::loss::{aggregation, clip, clip_ratio, dual_clip, entropy, has_kl, loss_scale, policy_loss};
use super::optimizer::{cycles, first_step, min_lr, optimizer, schedule, warmup_ratio, warmup_steps};
use crate::common::{self, PACKED, built_in, devices, given, grouped, precision, size};
use crate::key_mapping::prelude::*;

pub(super) const ONE_EXECUTOR: &str = "one executor runs every plan: there is no wrapper to choose";
pub(super) const PROFILER: &str = "`firebrick train CONFIG --profile N` writes a trace of N steps for Perfetto";
pub(super) const DYNAMIC: &str = "use_dynamic_bsz: tokens bound a micro-batch";
const KERNELS: &str = "kernels are compiled by the backend";
const CHUNKS: &str = "log-probs and entropy come from chunks of memory.head_rows rows, and nothing of them is kept";
const NO_QAT: &str = "weights are trained as they are, without quantization";
const SQUARES: &str = "no estimator here needs the sum of squared probabilities";
const NO_KL: &str = "use_kl_loss is off, so the key is ignored";
const SEED: &str = "trainer.seed seeds everything";

pub(super) const TABLE: KeyTable = (
    "actor_rollout_ref.actor.",
    &[
        ("strategy fsdp_config.** megatron.**", NotNeeded(ONE_EXECUTOR)),
        ("rollout_n", NotNeeded("set by rollout.n")),
        ("ppo_mini_batch_size", By(mini_batch)),
        ("ppo_micro_batch_size_per_gpu", If(counts_sequences, DYNAMIC, &By(|a| micro_batch(a, 1)))),
        ("ppo_micro_batch_size", If(counts_sequences, DYNAMIC, &By(global_micro_batch))),
        ("use_dynamic_bsz", NotNeeded("micro-batches are always packed by tokens (memory.train_tokens)")),
        ("ppo_max_token_len_per_gpu", By(train_tokens)),
        ("ppo_epochs", Same("update.ppo_epochs")),
        ("shuffle", By(shuffle)),
        ("data_loader_seed", NotNeeded("mini-batches are not shuffled; trainer.seed seeds everything")),
        ("clip_ratio", By(clip_ratio)),
        ("clip_ratio_low", To(clip, "objective.clip_ratio_low")),
        ("clip_ratio_high", To(clip, "objective.clip_ratio_high")),
        ("clip_ratio_c", By(dual_clip)),
        ("{,policy_loss.}{tau_pos,tau_neg}", Under("objective")),
        ("policy_loss.loss_mode", By(policy_loss)),
        ("policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef}", Under("objective")),
        ("policy_loss.dro_beta", Off("docs/guides/algorithms.md lists the losses")),
        ("loss_agg_mode", By(aggregation)),
        ("loss_scale_factor", By(loss_scale)),
        ("entropy_coeff", By(entropy)),
        ("calculate_entropy", NotNeeded("the entropy is always reported")),
        (
            "use_kl_loss",
            By(|a| {
                if a.is_on() {
                    not_needed("set by objective.kl_loss_coef above 0")
                } else {
                    set("objective.kl_loss_coef", 0.0)
                }
            }),
        ),
        ("kl_loss_coef kl_loss_type", If(has_kl, NO_KL, &Under("objective"))),
        ("use_prefix_grouper", NotNeeded("the prompt of a group is run once while sampling")),
        ("use_torch_compile", NotNeeded(KERNELS)),
        ("use_fused_kernels", NotNeeded("norms, attention and the head are fused kernels")),
        ("use_remove_padding pad_to_length", NotNeeded(PACKED)),
        // as other engines call it
        ("{,fsdp_config.}ulysses_sequence_parallel_size megatron.context_parallel_size", To(grouped, SEQUENCES)),
        ("entropy_{from_logits_with_chunking,checkpointing,from_logits_chunk_size}", NotNeeded(CHUNKS)),
        ("calculate_sum_pi_squared sum_pi_squared_checkpointing", NotNeeded(SQUARES)),
        ("tis_imp_ratio_cap", By(truncated)),
        ("{,fsdp_config.,megatron.}qat.enable", Off(NO_QAT)),
        ("qat.**", NotNeeded("qat.enable controls whether weights are quantized in training")),
        ("state_masking", NotNeeded("what a tool answers is never trained on")),
        // DeepScaleR's switch
        (
            "use_token_level_loss",
            By(|a| set("objective.loss_agg_mode", if a.is_on() { "token-mean" } else { "seq-mean-token-mean" })),
        ),
        ("freeze_vision_tower", NotNeeded("models read only text")),
        ("grad_clip optim.clip_grad", Same("optim.clip_grad")),
        ("checkpoint.**", NotNeeded("a checkpoint has the model and all that --resume needs")),
        ("profiler.** profile.**", NotNeeded(PROFILER)),
        ("router_replay.**", Off("routes are replayed from the rollout, not from files: rollout.router_replay")),
        ("router_replay.mode", By(replay)),
        ("optim.**", Off("AdamW on clipped gradients is the optimizer; its keys are under `optim`")),
        ("optim.lr optim.betas optim.weight_decay optim.eps", Under("optim")),
        ("optim.optimizer optim.optimizer_impl", By(optimizer)),
        ("optim.lr_warmup_steps", To(warmup_steps, "optim")),
        ("optim.lr_warmup_steps_ratio", To(warmup_ratio, "optim")),
        ("optim.lr_scheduler_type optim.warmup_style optim.lr_decay_style", To(schedule, "optim")),
        ("optim.min_lr_ratio", To(min_lr, "optim")),
        ("optim.num_cycles", To(cycles, "optim")),
        ("optim.zero_indexed_step", By(first_step)),
        ("optim.total_training_steps optim.lr_decay_steps", NotNeeded("the schedule is over trainer.steps")),
        ("optim.override_optimizer_config.optimizer_cpu_offload", On("memory.optimizer_offload", "cpu")),
        (
            "optim.override_optimizer_config.optimizer_offload_fraction",
            If(
                |a| a.facts.is_on(ON_CPU),
                "optimizer_cpu_offload is off: it is a share of that",
                &To(given, "memory.offload_fraction"),
            ),
        ),
        (
            "optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
            By(|a| {
                if a.is_on() {
                    not_needed("memory.prefetch is 1: the next copy starts before an update on the host")
                } else {
                    set("memory.prefetch", 0)
                }
            }),
        ),
        ("optim.override_optimizer_config.use_precision_aware_optimizer", On("memory.moments", "bf16")),
        ("fsdp_config.param_offload megatron.param_offload", By(params)),
        ("fsdp_config.optimizer_offload megatron.optimizer_offload", By(state)),
        ("fsdp_config.offload_policy fsdp_config.cpu_offload fsdp_config.offload_params", By(streamed)),
        (
            "fsdp_config.reshard_after_forward",
            NotNeeded(
                "one rank has nothing to shard; on several, memory.zero_stage: 3 shards weights, and \
                 memory.reshard_after_forward is this setting",
            ),
        ),
        (
            "fsdp_config.fsdp_size",
            By(|a| match a.whole() {
                Some(-1) => not_needed(
                    "memory.zero_stage shards state over the ranks of `mpirun`; one rank has nothing to shard",
                ),
                _ => devices(a),
            }),
        ),
        ("fsdp_config.dtype fsdp_config.mixed_precision.param_dtype megatron.dtype", By(precision)),
        ("fsdp_config.model_dtype", By(masters)),
        ("fsdp_config.seed megatron.seed", NotNeeded(SEED)),
        ("fsdp_config.forward_prefetch", NotNeeded("memory.prefetch sets the number of copies in flight")),
        ("fsdp_config.full_determinism", By(|a| built_in(a, "a run repeats to the bit unless deterministic: false"))),
        ("megatron.grad_offload", On("memory.grad_offload", "true")),
        ("megatron.tensor_model_parallel_size", To(grouped, MATRICES)),
        ("megatron.pipeline_model_parallel_size", To(grouped, STAGES)),
        ("megatron.{virtual_pipeline_model,expert_model,expert_tensor}_parallel_size", By(devices)),
        ("megatron.override_transformer_config.recompute_granularity", By(granularity)),
        ("megatron.override_transformer_config.recompute_method", By(method)),
        ("megatron.override_transformer_config.recompute_num_layers", By(layers)),
        ("megatron.override_transformer_config.**", NotNeeded("Megatron's kernels; ours are built in")),
    ],
);

pub(super) const REFERENCE: KeyTable = (
    "actor_rollout_ref.ref.",
    &[
        ("strategy fsdp_config.** megatron.**", NotNeeded(ONE_EXECUTOR)),
        ("rollout_n", NotNeeded("set by rollout.n")),
        ("fsdp_config.param_offload megatron.param_offload", On("memory.reference.param_offload", "idle")),
        ("megatron.tensor_model_parallel_size", To(policys, MATRICES)),
        ("megatron.pipeline_model_parallel_size", To(policys, STAGES)),
        ("{,fsdp_config.}ulysses_sequence_parallel_size megatron.context_parallel_size", To(policys, SEQUENCES)),
        ("megatron.{virtual_pipeline_model,expert_model,expert_tensor}_parallel_size", By(devices)),
        ("entropy_{from_logits_with_chunking,checkpointing,from_logits_chunk_size}", NotNeeded(CHUNKS)),
        ("pad_to_length", NotNeeded(PACKED)),
        ("log_prob_micro_batch_size_per_gpu", To(sequences, "memory.reference.score_tokens")),
        ("log_prob_{micro_batch_size,use_dynamic_bsz}", NotNeeded("memory.reference.score_tokens bounds scoring")),
        ("log_prob_max_token_len_per_gpu", To(policy_tokens, "memory.reference.score_tokens")),
        ("use_torch_compile", NotNeeded(KERNELS)),
        ("profiler.** profile.**", NotNeeded(PROFILER)),
        ("router_replay.**", Off("rollout.router_replay replays routes in the policy, not in the reference")),
        ("model.**", Off("the reference is the policy before the first step; another cannot be one")),
    ],
);

pub(super) const MATRICES: &str = "memory.tensor_model_parallel_size";
pub(super) const STAGES: &str = "memory.pipeline_model_parallel_size";
const SEQUENCES: &str = "memory.ulysses_sequence_parallel_size";
const ON_CPU: &str = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload";

fn of_actor(asked: &SourceKey, name: &str) -> bool {
    asked.facts.is_on(&format!("actor_rollout_ref.actor.{name}"))
}

/// The order of mini-batches, of which a step may have one.
fn shuffle(asked: &SourceKey) -> MappedKey {
    let mini = asked.facts.whole("actor_rollout_ref.actor.ppo_mini_batch_size").unwrap_or(256);
    match asked.is_on() {
        false => not_needed("off, as here"),
        true if prompts(asked.facts) <= mini => not_needed("a step has one mini-batch"),
        true => cannot("mini-batches are taken in the order of the step's prompts"),
    }
}

/// Truncated importance weights of 2025.
fn truncated(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(cap) if cap > 0.0 => {
            set_all([("objective.rollout_is", "token_truncate".into()), ("objective.rollout_is_threshold", cap.into())])
        }
        _ if asked.is_off() => off(),
        _ => asked.wrong("a number"),
    }
}

/// Prompts an optimizer step, in both engines.
fn mini_batch(asked: &SourceKey) -> MappedKey {
    let prompts = prompts(asked.facts);
    match asked.count() {
        Some(mini) if mini <= prompts && prompts % mini == 0 => set("update.ppo_mini_batch_size", mini),
        Some(mini) => cannot(format!(
            "update.ppo_mini_batch_size has to divide trainer.train_batch_size, and {prompts} is no multiple of {mini}; without it \
             all prompts make one optimizer step"
        )),
        None => asked.wrong("a number of prompts"),
    }
}

/// Whether micro-batches are bounded by sequences.
pub(super) fn counts_sequences(asked: &SourceKey) -> bool {
    !of_actor(asked, "use_dynamic_bsz")
}

fn micro_batch(asked: &SourceKey, devices: i64) -> MappedKey {
    asked.count().map_or_else(
        || asked.off_or_wrong("a number of sequences"),
        |n| {
            set("memory.micro_batch_size", (n / devices).max(1)).noted(
                "sequences; without it only memory.train_tokens splits a step into micro-batches, with the same results",
            )
        },
    )
}

/// The older key counts the sequences of all devices.
fn global_micro_batch(asked: &SourceKey) -> MappedKey {
    let count = |key| asked.facts.whole(key).unwrap_or(1).max(1);
    micro_batch(asked, count("trainer.n_gpus_per_node") * count("trainer.nnodes"))
}

/// `R3` takes routes from the rollout, `R2` from the old log-probs' pass.
fn replay(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("R3") => set("rollout.router_replay", true),
        Some("R2") => cannot("routes are replayed from the rollout: rollout.router_replay"),
        _ if asked.is_off() => off(),
        _ => asked.wrong("disabled, R2 or R3"),
    }
}

fn train_tokens(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("actor_rollout_ref.actor.use_dynamic_bsz").is_some() && counts_sequences(asked) {
        return not_needed("use_dynamic_bsz is off: verl does not read it");
    }
    policy_tokens(asked, "memory.train_tokens")
}

/// Ranks that the policy divides something over, by the setting that it is here.
fn degree(asked: &SourceKey, ours: &str) -> i64 {
    let theirs: &[&str] = match ours {
        MATRICES => &["megatron.tensor_model_parallel_size"],
        STAGES => &["megatron.pipeline_model_parallel_size"],
        _ => &[
            "ulysses_sequence_parallel_size",
            "fsdp_config.ulysses_sequence_parallel_size",
            "megatron.context_parallel_size",
        ],
    };
    let own = theirs.iter().filter_map(|key| asked.facts.whole(&format!("actor_rollout_ref.actor.{key}")));
    own.max().unwrap_or(1).max(1)
}

/// Ranks that share the policy's sequences.
pub(super) fn policy_sharing(asked: &SourceKey) -> i64 {
    degree(asked, SEQUENCES)
}

/// The degree of a model that is not the policy: all have the policy's.
pub(super) fn policys(asked: &SourceKey, ours: &str) -> MappedKey {
    let policy = degree(asked, ours);
    match asked.whole().map_or(1, |n| n.max(1)) {
        n if n == policy => not_needed("policy, reference and critic have the same"),
        n => not_needed(format!(
            "policy, reference and critic are divided over the same ranks, with the same results: the policy's degree is \
             {policy} and this is {n}, and the former applies ({ours})"
        )),
    }
}

/// Most tokens of a micro-batch that so many ranks share, of which the source counts those of one.
pub(super) fn tokens_of_ranks(asked: &SourceKey, key: &str, ranks: i64) -> MappedKey {
    match asked.count() {
        Some(n) if ranks > 1 => {
            set(key, n * ranks).noted(format!("{n} on each of the {ranks} ranks that share a micro-batch"))
        }
        _ => size(asked, key),
    }
}

pub(super) fn policy_tokens(asked: &SourceKey, key: &str) -> MappedKey {
    tokens_of_ranks(asked, key, policy_sharing(asked))
}

/// Sequences of a scoring batch, as the tokens that they have at most.
pub(super) fn sequences(asked: &SourceKey, key: &str) -> MappedKey {
    let length = |key| asked.facts.whole(key).unwrap_or(512).max(1);
    let longest = length("data.max_prompt_length") + length("data.max_response_length");
    match asked.count() {
        _ if !counts_sequences(asked) => not_needed(DYNAMIC),
        Some(n) => set(key, n * longest).noted(format!("{n} sequences of at most {longest} tokens")),
        None => asked.off_or_wrong("a number of sequences"),
    }
}

/// Whether the weights are streamed, and the optimizer on the host with them.
pub(super) fn streams(asked: &SourceKey) -> bool {
    let keys = ["offload_policy", "cpu_offload", "offload_params"];
    keys.iter().any(|key| of_actor(asked, &format!("fsdp_config.{key}")))
}

fn params(asked: &SourceKey) -> MappedKey {
    match asked.is_on() {
        true if streams(asked) => not_needed("weights are always on the host (memory.param_offload: streamed)"),
        true => set("memory.param_offload", "idle"),
        false => off(),
    }
}

fn state(asked: &SourceKey) -> MappedKey {
    match asked.is_on() {
        true if asked.facts.is_on(ON_CPU) || streams(asked) => {
            not_needed("the optimizer is always on the host (memory.optimizer_offload: cpu)")
        }
        true => set("memory.optimizer_offload", "idle"),
        false => off(),
    }
}

/// FSDP's own offload: weights, gradients and the update on the host.
fn streamed(asked: &SourceKey) -> MappedKey {
    common::streamed(asked, asked.facts.is_on("actor_rollout_ref.model.enable_gradient_checkpointing"))
}

fn masters(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("fp32" | "float32") | None => not_needed("master weights are f32"),
        Some(_) => {
            cannot("master weights are f32 in every precision; memory.moments saves bytes of the optimizer's state")
        }
    }
}

fn granularity(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("full") => {
            set_all([("memory.gradient_checkpointing", true.into()), ("memory.recompute_granularity", "block".into())])
        }
        Some("selective") => not_needed("attention keeps no scores, regardless of recomputation"),
        _ => asked.off_or_wrong("full or selective"),
    }
}

fn method(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("uniform") => not_needed("all segments have the same number of layers (memory.checkpoint_every)"),
        Some("block") => not_needed("layers that recompute are listed: memory.checkpoint_layers: [0, 1, …]"),
        _ => asked.off_or_wrong("uniform or block"),
    }
}

fn layers(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(_) if asked.beside("recompute_method").is_some_and(|own| own == "block") => {
            not_needed("it counts the layers of recompute_method: block")
        }
        _ => size(asked, "memory.checkpoint_every"),
    }
}
