//! verl's `critic`.

use super::actor::{
    MATRICES, ONE_EXECUTOR, PROFILER, STAGES, counts_sequences, policy_sharing, policys, tokens_of_ranks,
};
use super::optimizer::{cycles, first_step, min_lr, optimizer, schedule, warmup_ratio, warmup_steps};
use crate::common::{NO_PYTHON, devices, given, path, size};
use crate::key_mapping::KeyMapping;
use crate::key_mapping::prelude::*;

const AS_POLICY: &str = "the remark on the same key of the policy applies";
const NO_SEQUENCES: &str = "there is no critic, or tokens bound a micro-batch";
pub(super) const NO_CRITIC: &str = "adv_estimator is not gae: there is no critic";

/// A rule for a run that has a critic.
const fn own(rule: &'static KeyMapping) -> KeyMapping {
    If(has_critic, NO_CRITIC, rule)
}

pub(super) fn has_critic(asked: &SourceKey) -> bool {
    asked.facts.text("algorithm.adv_estimator") == Some("gae")
}

pub(super) const TABLE: KeyTable = (
    "critic.",
    &[
        ("enable", By(enable)),
        ("model.path", own(&By(critic_path))),
        ("model.tokenizer_path", NotNeeded("the critic reads the policy's tokens")),
        ("model.enable_gradient_checkpointing", own(&To(given, "memory.critic.gradient_checkpointing"))),
        ("model.enable_activation_offload", own(&To(given, "memory.critic.activation_offload"))),
        // verl of 2026 has them outside `model`
        ("{model.fsdp_config,fsdp,megatron}.param_offload", own(&To(idle, "param_offload"))),
        ("{model.fsdp_config,fsdp,megatron}.optimizer_offload", own(&To(idle, "optimizer_offload"))),
        ("megatron.grad_offload", own(&To(given, "memory.critic.grad_offload"))),
        ("megatron.tensor_model_parallel_size", own(&To(policys, MATRICES))),
        ("megatron.pipeline_model_parallel_size", own(&To(policys, STAGES))),
        ("{,fsdp.}ulysses_sequence_parallel_size megatron.context_parallel_size", own(&By(shared_sequences))),
        ("megatron.expert_model_parallel_size megatron.expert_tensor_parallel_size", By(devices)),
        ("strategy megatron.**", NotNeeded(ONE_EXECUTOR)),
        ("model.lora_rank", Off("all of a critic's weights are trained")),
        ("model.trust_remote_code", NotNeeded(NO_PYTHON)),
        ("model.external_lib", Off("no Python is run: what the library changes is not read")),
        ("model.** fsdp.** optim.override_optimizer_config.** shuffle", NotNeeded(AS_POLICY)),
        ("loss_scale_factor", Off("critic.loss_agg_mode divides by sequences and the response length")),
        ("nccl_timeout", NotNeeded("ranks wait for each other without a limit")),
        ("optim.lr optim.weight_decay optim.betas", own(&Under("critic.optim"))),
        ("optim.clip_grad grad_clip", own(&To(given, "critic.optim.clip_grad"))),
        ("optim.optimizer optim.optimizer_impl", By(optimizer)),
        ("optim.lr_warmup_steps", own(&To(warmup_steps, "critic.optim"))),
        ("optim.lr_warmup_steps_ratio", own(&To(warmup_ratio, "critic.optim"))),
        ("optim.lr_scheduler_type optim.warmup_style", own(&To(schedule, "critic.optim"))),
        ("optim.min_lr_ratio", own(&To(min_lr, "critic.optim"))),
        ("optim.num_cycles", own(&To(cycles, "critic.optim"))),
        ("optim.zero_indexed_step", By(first_step)),
        ("optim.total_training_steps", NotNeeded("the schedule is over trainer.steps")),
        ("cliprange_value loss_agg_mode", own(&Under("critic"))),
        ("ppo_epochs", own(&To(shared, "update.ppo_epochs"))),
        ("ppo_mini_batch_size", own(&To(shared, "update.ppo_mini_batch_size"))),
        ("ppo_micro_batch_size_per_gpu", If(sequences, NO_SEQUENCES, &To(size, "memory.critic.micro_batch_size"))),
        ("ppo_micro_batch_size", NotNeeded("memory.critic.train_tokens bounds its micro-batches")),
        ("forward_micro_batch_size{,_per_gpu}", NotNeeded("memory.critic.score_tokens bounds scoring")),
        ("use_dynamic_bsz", NotNeeded("micro-batches are always packed by tokens (memory.critic.train_tokens)")),
        ("ppo_max_token_len_per_gpu", own(&To(tokens, "memory.critic.train_tokens"))),
        ("forward_max_token_len_per_gpu", own(&To(tokens, "memory.critic.score_tokens"))),
        ("data_loader_seed", NotNeeded("mini-batches are not shuffled; trainer.seed seeds everything")),
        ("rollout_n", NotNeeded("set by rollout.n")),
        ("checkpoint.**", NotNeeded("a checkpoint has the critic and all that --resume needs")),
        ("profiler.**", NotNeeded(PROFILER)),
    ],
);

/// Ranks that share the critic's sequences; where nothing is said of it, as many as share the policy's.
fn sharing(asked: &SourceKey) -> i64 {
    let keys = ["critic.", "critic.fsdp."].map(|section| format!("{section}ulysses_sequence_parallel_size"));
    let keys = keys.iter().map(String::as_str).chain(["critic.megatron.context_parallel_size"]);
    let own = keys.filter_map(|key| asked.facts.whole(key)).max();
    own.map_or_else(|| policy_sharing(asked), |n| n.max(1))
}

fn shared_sequences(asked: &SourceKey) -> MappedKey {
    match sharing(asked) {
        own if own == policy_sharing(asked) => not_needed("as many as share the policy's, as here by default"),
        own => set("critic.ulysses_sequence_parallel_size", own),
    }
}

fn enable(asked: &SourceKey) -> MappedKey {
    match (asked.value.as_bool(), has_critic(asked)) {
        (Some(true), false) => not_needed("no other estimator than gae reads its values"),
        (Some(false), true) => cannot("gae needs a critic: set another adv_estimator"),
        _ => not_needed("set by adv_estimator"),
    }
}

fn critic_path(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(own) if asked.facts.text("actor_rollout_ref.model.path") == Some(own) => {
            not_needed("the policy's folder: a critic without a path is a copy of the policy with a value head")
        }
        Some(folder) => set("critic.model.path", path(asked.facts, folder)),
        None => absent(),
    }
}

fn idle(asked: &SourceKey, name: &str) -> MappedKey {
    let key = format!("memory.critic.{name}");
    // what is not said of the critic is the policy's
    match asked.is_on() {
        true => set(&key, "idle"),
        false if asked.facts.is_on(&format!("actor_rollout_ref.actor.fsdp_config.{name}")) => set(&key, "none"),
        false => off(),
    }
}

/// What policy and critic have in common.
fn shared(asked: &SourceKey, ours: &str) -> MappedKey {
    let theirs = asked.key.replace("critic.", "actor_rollout_ref.actor.");
    if asked.is_absent() || asked.facts.whole(&theirs).is_none_or(|policy| Some(policy) == asked.whole()) {
        return not_needed(format!("{ours} is the critic's too"));
    }
    cannot(format!("{ours} is the critic's too: the two cannot differ"))
}

fn sequences(asked: &SourceKey) -> bool {
    has_critic(asked) && counts_sequences(asked) && !asked.facts.is_on("critic.use_dynamic_bsz")
}

fn tokens(asked: &SourceKey, key: &str) -> MappedKey {
    tokens_of_ranks(asked, key, sharing(asked))
}
