//! `NeMo RL`'s PPO: its rounds, the `value` model, which is the critic here, and its loss.

use super::grpo::{ONE_EPOCHS, of_run};
use super::optimizer::{OF_TORCH, is_megatron};
use super::policy::ONE_EXECUTOR;
use crate::common::{PACKED, bound, devices, path, size};
use crate::key_mapping::prelude::*;

const ONE_LAMBDA: &str = "policy and critic have one lambda: objective.lam";
const NO_LOOKAHEAD: &str = "every step is sampled from the weights that it updates";
const WHITENED: &str = "gae's advantages are always normalized over the step";
const SCALE: &str = "the critic has a separate optimizer, and a constant factor does not change AdamW updates";
const RECOMPUTED: &str = "memory.critic.gradient_checkpointing";
const AS_POLICY: &str = "policy, reference and critic are divided over the same ranks, with the same results";

pub(super) const ROUNDS: KeyTable = (
    "ppo.",
    &[
        ("ppo_epochs", Same("update.ppo_epochs")),
        ("critic_ppo_epochs", By(critic_epochs)),
        ("policy_training_start_step", To(bound, "critic.warmup")),
        ("warm_start_value_checkpoint", Off("write the critic's folder as critic.model.path")),
        ("async_ppo.enabled", Off(NO_LOOKAHEAD)),
        ("async_ppo.**", NotNeeded("async_ppo.enabled controls whether sampling runs ahead")),
        ("adv_estimator.gae_lambda", Same("objective.lam")),
        ("adv_estimator.gae_gamma", Same("objective.gamma")),
        ("adv_estimator.normalize_advantages", By(whitening)),
        ("adv_estimator.{gae_lambda_value,gae_lambda_policy,length_adaptive_alpha}", Off(ONE_LAMBDA)),
    ],
);

pub(super) const LOSS: KeyTable = ("value_loss_fn.", &[("scale", NotNeeded(SCALE)), ("cliprange", By(range))]);

pub(super) const TABLE: KeyTable = (
    "value.",
    &[
        ("model_name", By(start)),
        ("tokenizer.**", NotNeeded("the critic reads the policy's tokens")),
        ("hf_config_overrides.**", Off("the model's config.json defines the model: edit it in the folder")),
        ("train_global_batch_size", By(same_batch)),
        ("train_micro_batch_size", To(size, "memory.critic.micro_batch_size")),
        ("max_total_sequence_length precision", NotNeeded("the policy's, as there")),
        ("reward_model_cfg.**", NotNeeded("a critic has a value head")),
        ("dtensor_cfg.activation_checkpointing", If(|a| !is_megatron(a), OF_MEGATRON, &On(RECOMPUTED, "true"))),
        ("megatron_cfg.activation_checkpointing", If(is_megatron, OF_TORCH, &On(RECOMPUTED, "true"))),
        ("dtensor_cfg.cpu_offload", Off("memory.critic.param_offload and optimizer_offload keep it on the host")),
        ("dtensor_cfg.lora_cfg.enabled megatron_cfg.peft.enabled", Off("all of a critic's weights are trained")),
        (
            "dtensor_cfg.{tensor,context}_parallel_size megatron_cfg.{context,tensor_model,pipeline_model}_parallel_size",
            NotNeeded(AS_POLICY),
        ),
        ("megatron_cfg.expert_model_parallel_size megatron_cfg.expert_tensor_parallel_size", By(devices)),
        ("dtensor_cfg.** megatron_cfg.**", NotNeeded(ONE_EXECUTOR)),
        ("sequence_packing.train_mb_tokens dynamic_batching.train_mb_tokens", By(tokens)),
        ("dynamic_batching.** sequence_packing.** make_sequence_length_divisible_by", NotNeeded(PACKED)),
    ],
);

const OF_MEGATRON: &str = "megatron_cfg is enabled";

fn critic_epochs(asked: &SourceKey) -> MappedKey {
    let policy = of_run(asked.facts, "ppo_epochs").and_then(crate::facts::whole);
    if asked.is_absent() || policy == asked.whole() { not_needed(ONE_EPOCHS) } else { cannot(ONE_EPOCHS) }
}

fn whitening(asked: &SourceKey) -> MappedKey {
    if asked.is_on() || asked.is_absent() { not_needed(WHITENED) } else { cannot(WHITENED) }
}

/// As good as no bound of a change.
const UNBOUNDED: f64 = 1e9;

fn range(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(range) => set("critic.cliprange_value", range),
        None if asked.is_absent() => set("critic.cliprange_value", UNBOUNDED).noted("not clipped there"),
        None => asked.wrong("a number"),
    }
}

fn start(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(own) if asked.facts.text("policy.model_name") == Some(own) => {
            not_needed("the policy's: a critic without a path is a copy of the policy with a value head")
        }
        Some(folder) => set("critic.model.path", path(asked.facts, folder)),
        None => asked.off_or_wrong("a model's folder or name"),
    }
}

fn same_batch(asked: &SourceKey) -> MappedKey {
    if asked.is_absent() || asked.facts.whole("policy.train_global_batch_size") == asked.whole() {
        return not_needed("update.ppo_mini_batch_size is the critic's too");
    }
    cannot("update.ppo_mini_batch_size is the critic's too: the two cannot differ")
}

fn tokens(asked: &SourceKey) -> MappedKey {
    match asked.beside("enabled").and_then(crate::facts::truth) {
        Some(true) => size(asked, "memory.critic.train_tokens"),
        _ => not_needed("its section is off, so the key is ignored"),
    }
}
