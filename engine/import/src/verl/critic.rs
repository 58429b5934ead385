//! verl's `critic`.

use super::actor::{STAGES, TENSOR, first_step, policy_sharing, tokens_of_ranks};
use super::optimizer::{NO_CRITIC, cycles, has_critic, min_lr, optimizer, schedule, warmup_ratio, warmup_steps};
use crate::common::{devices, path, same_training_groups, same_training_stages, size};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};

const AS_POLICY: &str = "the remark on the same key of the policy applies";
const ONE_EXECUTOR: &str = "one executor runs every plan: there is no wrapper to choose";

pub(super) const TABLE: &[KeyRule] = &[
    ("critic.enable", By(enable)),
    ("critic.model.path", By(critic_path)),
    ("critic.model.tokenizer_path", NotNeeded("the critic reads the policy's tokens")),
    ("critic.model.enable_gradient_checkpointing", By(|a| of_critic(a, "memory.critic.gradient_checkpointing"))),
    ("critic.model.enable_activation_offload", By(|a| of_critic(a, "memory.critic.activation_offload"))),
    ("critic.model.fsdp_config.param_offload", By(|a| idle_critic(a, "memory.critic.param_offload"))),
    ("critic.model.fsdp_config.optimizer_offload", By(|a| idle_critic(a, "memory.critic.optimizer_offload"))),
    ("critic.megatron.param_offload", By(|a| idle_critic(a, "memory.critic.param_offload"))),
    ("critic.megatron.optimizer_offload", By(|a| idle_critic(a, "memory.critic.optimizer_offload"))),
    ("critic.megatron.grad_offload", By(|a| of_critic(a, "memory.critic.grad_offload"))),
    (
        "critic.megatron.tensor_model_parallel_size",
        By(|a| if has_critic(a) { same_training_groups(a, TENSOR) } else { not_needed(NO_CRITIC) }),
    ),
    (
        "critic.megatron.pipeline_model_parallel_size",
        By(|a| if has_critic(a) { same_training_stages(a, STAGES) } else { not_needed(NO_CRITIC) }),
    ),
    ("critic.megatron.context_parallel_size", By(shared_sequences)),
    ("critic.megatron.expert_model_parallel_size", By(devices)),
    ("critic.megatron.expert_tensor_parallel_size", By(devices)),
    ("critic.megatron.**", NotNeeded(ONE_EXECUTOR)),
    ("critic.model.lora_rank", Off("all of a critic's weights are trained")),
    ("critic.model.trust_remote_code", NotNeeded("no Python is run: model families are built in")),
    ("critic.model.external_lib", Off("no Python is run: what the library changes is not read")),
    ("critic.model.**", NotNeeded(AS_POLICY)),
    // verl of 2026 has them outside `model`
    ("critic.fsdp.param_offload", By(|a| idle_critic(a, "memory.critic.param_offload"))),
    ("critic.fsdp.optimizer_offload", By(|a| idle_critic(a, "memory.critic.optimizer_offload"))),
    ("critic.fsdp.ulysses_sequence_parallel_size", By(shared_sequences)),
    ("critic.fsdp.**", NotNeeded(AS_POLICY)),
    ("critic.loss_scale_factor", Off("critic.loss_agg_mode divides by sequences and the response length")),
    ("critic.nccl_timeout", NotNeeded("ranks wait for each other without a limit")),
    ("critic.optim.lr", By(|a| of_critic(a, "critic.optim.lr"))),
    ("critic.optim.weight_decay", By(|a| of_critic(a, "critic.optim.weight_decay"))),
    ("critic.optim.betas", By(|a| of_critic(a, "critic.optim.betas"))),
    ("critic.optim.clip_grad", By(|a| of_critic(a, "critic.optim.clip_grad"))),
    ("critic.optim.optimizer", By(optimizer)),
    ("critic.optim.optimizer_impl", By(optimizer)),
    ("critic.optim.lr_warmup_steps", By(|a| warmup_steps(a, "critic.optim"))),
    ("critic.optim.lr_warmup_steps_ratio", By(|a| warmup_ratio(a, "critic.optim"))),
    ("critic.optim.lr_scheduler_type", By(|a| schedule(a, "critic.optim"))),
    ("critic.optim.warmup_style", By(|a| schedule(a, "critic.optim"))),
    ("critic.optim.min_lr_ratio", By(|a| min_lr(a, "critic.optim"))),
    ("critic.optim.num_cycles", By(|a| cycles(a, "critic.optim"))),
    ("critic.optim.zero_indexed_step", By(first_step)),
    ("critic.optim.total_training_steps", NotNeeded("the schedule is over trainer.steps")),
    ("critic.optim.override_optimizer_config.**", NotNeeded(AS_POLICY)),
    ("critic.grad_clip", By(|a| of_critic(a, "critic.optim.clip_grad"))),
    ("critic.cliprange_value", By(|a| of_critic(a, "critic.cliprange_value"))),
    ("critic.loss_agg_mode", By(|a| of_critic(a, "critic.loss_agg_mode"))),
    ("critic.ppo_epochs", By(|a| shared(a, "actor_rollout_ref.actor.ppo_epochs", "update.ppo_epochs"))),
    (
        "critic.ppo_mini_batch_size",
        By(|a| shared(a, "actor_rollout_ref.actor.ppo_mini_batch_size", "update.ppo_mini_batch_size")),
    ),
    ("critic.ppo_micro_batch_size_per_gpu", By(critic_micro_batch)),
    ("critic.ppo_micro_batch_size", NotNeeded("memory.critic.train_tokens bounds its micro-batches")),
    ("critic.forward_micro_batch_size_per_gpu", NotNeeded("memory.critic.score_tokens bounds its forward batches")),
    ("critic.forward_micro_batch_size", NotNeeded("memory.critic.score_tokens bounds its forward batches")),
    ("critic.use_dynamic_bsz", NotNeeded("micro-batches are always packed by tokens (memory.critic.train_tokens)")),
    ("critic.ppo_max_token_len_per_gpu", By(|a| tokens(a, "memory.critic.train_tokens"))),
    ("critic.forward_max_token_len_per_gpu", By(|a| tokens(a, "memory.critic.score_tokens"))),
    ("critic.shuffle", NotNeeded("the remark on actor.shuffle applies")),
    ("critic.data_loader_seed", NotNeeded("mini-batches are not shuffled; trainer.seed seeds everything")),
    ("critic.strategy", NotNeeded(ONE_EXECUTOR)),
    ("critic.rollout_n", NotNeeded("set by rollout.n")),
    ("critic.ulysses_sequence_parallel_size", By(shared_sequences)),
    ("critic.checkpoint.**", NotNeeded("a checkpoint has the critic and all that --resume needs")),
    ("critic.profiler.**", NotNeeded("`firebrick train CONFIG --profile N` writes a trace of N steps for Perfetto")),
];

const SHARED: &str = "critic.ulysses_sequence_parallel_size";
const ALL_SHARED: [&str; 3] =
    [SHARED, "critic.fsdp.ulysses_sequence_parallel_size", "critic.megatron.context_parallel_size"];

/// Ranks that share the critic's sequences.
fn shared_sequences(asked: &SourceKey) -> MappedKey {
    match sharing(asked) {
        _ if !has_critic(asked) => not_needed(NO_CRITIC),
        own if own == policy_sharing(asked) => not_needed("as many as share the policy's, as here by default"),
        own => set(SHARED, own),
    }
}

/// Where nothing is said of the critic, as many as share the policy's.
fn sharing(asked: &SourceKey) -> i64 {
    let own = ALL_SHARED.iter().filter_map(|key| asked.facts.whole(key)).max();
    own.map_or_else(|| policy_sharing(asked), |n| n.max(1))
}

fn of_critic(asked: &SourceKey, key: &str) -> MappedKey {
    if !has_critic(asked) {
        return not_needed(NO_CRITIC);
    }
    if asked.is_absent() {
        return not_needed("has no value in the files");
    }
    set(key, plain(asked.value))
}

fn enable(asked: &SourceKey) -> MappedKey {
    match (asked.value.as_bool(), has_critic(asked)) {
        (Some(true), false) => not_needed("no other estimator than gae reads its values"),
        (Some(false), true) => cannot("gae needs a critic: set another adv_estimator"),
        _ => not_needed("set by adv_estimator"),
    }
}

fn critic_path(asked: &SourceKey) -> MappedKey {
    let model = asked.facts.text("actor_rollout_ref.model.path");
    match asked.text() {
        _ if !has_critic(asked) => not_needed(NO_CRITIC),
        own if own.is_some() && own == model => {
            not_needed("the policy's folder: a critic without a path is a copy of the policy with a value head")
        }
        Some(folder) => set("critic.model.path", path(asked.facts, folder)),
        None => not_needed("has no value in the files"),
    }
}

fn idle_critic(asked: &SourceKey, key: &str) -> MappedKey {
    let policy = key.replace("memory.critic.", "");
    let own = format!("actor_rollout_ref.actor.fsdp_config.{policy}");
    match asked.is_on() {
        _ if !has_critic(asked) => not_needed(NO_CRITIC),
        true => set(key, "idle"),
        // what is not said of the critic is the policy's
        false if asked.facts.is_on(&own) => set(key, "none"),
        false => not_needed("off, as here by default"),
    }
}

fn shared(asked: &SourceKey, theirs: &str, ours: &str) -> MappedKey {
    if !has_critic(asked) {
        return not_needed(NO_CRITIC);
    }
    if asked.is_absent() || asked.facts.whole(theirs).is_none_or(|policy| Some(policy) == asked.whole()) {
        return not_needed(format!("{ours} is the critic's too"));
    }
    cannot(format!("{ours} is the critic's too: the two cannot differ"))
}

fn critic_micro_batch(asked: &SourceKey) -> MappedKey {
    let dynamic = asked.facts.value("critic.use_dynamic_bsz").is_some() && asked.facts.is_on("critic.use_dynamic_bsz");
    if dynamic || asked.facts.is_on("actor_rollout_ref.actor.use_dynamic_bsz") {
        return not_needed("use_dynamic_bsz: tokens bound a micro-batch");
    }
    if has_critic(asked) { size(asked, "memory.critic.micro_batch_size") } else { not_needed(NO_CRITIC) }
}

fn tokens(asked: &SourceKey, key: &str) -> MappedKey {
    if has_critic(asked) { tokens_of_ranks(asked, key, sharing(asked)) } else { not_needed(NO_CRITIC) }
}

/// Sequences of a scoring batch, as the tokens that they have at most.
pub(super) fn sequences(asked: &SourceKey, key: &str) -> MappedKey {
    if asked.facts.is_on("actor_rollout_ref.actor.use_dynamic_bsz") {
        return not_needed("use_dynamic_bsz: tokens bound a micro-batch");
    }
    let length = |key| asked.facts.whole(key).unwrap_or(512).max(1);
    let longest = length("data.max_prompt_length") + length("data.max_response_length");
    match asked.whole() {
        Some(n) if n > 0 => set_noted(key, n * longest, format!("{n} sequences of at most {longest} tokens")),
        _ if asked.is_off() => not_needed("has no value in the files"),
        _ => asked.wrong("a number of sequences"),
    }
}
