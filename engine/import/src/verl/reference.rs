//! verl's `actor_rollout_ref.ref`.

use super::actor::{
    CHUNKS, KERNELS, ONE_EXECUTOR, PROFILER, STAGES, TENSOR, policy_sharing, same_shared_sequences, tokens_of_ranks,
};
use super::critic::sequences;
use crate::common::{devices, idle, same_training_groups, same_training_stages};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::KeyRule;

pub(super) const TABLE: &[KeyRule] = &[
    ("actor_rollout_ref.ref.strategy", NotNeeded(ONE_EXECUTOR)),
    ("actor_rollout_ref.ref.rollout_n", NotNeeded("set by rollout.n")),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", By(|a| idle(a, "memory.reference.param_offload"))),
    ("actor_rollout_ref.ref.megatron.param_offload", By(|a| idle(a, "memory.reference.param_offload"))),
    ("actor_rollout_ref.ref.fsdp_config.**", NotNeeded(ONE_EXECUTOR)),
    ("actor_rollout_ref.ref.megatron.tensor_model_parallel_size", By(|a| same_training_groups(a, TENSOR))),
    ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size", By(|a| same_training_stages(a, STAGES))),
    ("actor_rollout_ref.ref.megatron.virtual_pipeline_model_parallel_size", By(devices)),
    ("actor_rollout_ref.ref.megatron.context_parallel_size", By(same_shared_sequences)),
    ("actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size", By(same_shared_sequences)),
    ("actor_rollout_ref.ref.entropy_from_logits_chunk_size", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.ref.pad_to_length", NotNeeded("rows are packed without padding by default")),
    ("actor_rollout_ref.ref.megatron.expert_model_parallel_size", By(devices)),
    ("actor_rollout_ref.ref.megatron.expert_tensor_parallel_size", By(devices)),
    ("actor_rollout_ref.ref.megatron.**", NotNeeded(ONE_EXECUTOR)),
    ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", By(same_shared_sequences)),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", By(|a| sequences(a, "memory.reference.score_tokens"))),
    (
        "actor_rollout_ref.ref.log_prob_micro_batch_size",
        NotNeeded("scoring is bounded by tokens: memory.reference.score_tokens"),
    ),
    (
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
        NotNeeded("micro-batches are always packed by tokens (memory.reference.score_tokens)"),
    ),
    (
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        By(|a| tokens_of_ranks(a, "memory.reference.score_tokens", policy_sharing(a))),
    ),
    ("actor_rollout_ref.ref.entropy_from_logits_with_chunking", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.ref.entropy_checkpointing", NotNeeded(CHUNKS)),
    ("actor_rollout_ref.ref.use_torch_compile", NotNeeded(KERNELS)),
    ("actor_rollout_ref.ref.profiler.**", NotNeeded(PROFILER)),
    ("actor_rollout_ref.ref.profile.**", NotNeeded(PROFILER)),
    ("actor_rollout_ref.ref.router_replay._target_", NotNeeded("a class of verl's")),
    (
        "actor_rollout_ref.ref.router_replay.**",
        Off("rollout.router_replay replays routes in the policy; the reference routes tokens itself"),
    ),
    ("actor_rollout_ref.ref.model.**", Off("the reference is the policy before the first step; another cannot be one")),
];
