//! The arguments that `PPOConfig` alone has.

use super::batch::BatchSizes;
use super::class::{Class, class};
use super::grpo::kl;
use crate::common::{folder, model, reward_model, size, tracked};
use crate::key_mapping::prelude::*;
use serde_json::json;

const FOLLOWS: &str = "it follows from the batch sizes";
const STOPS: &str = "rollout.stop takes strings that end a completion, in addition to the model's end tokens";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("sft_model_path", By(model)),
        ("reward_model_path", By(judge)),
        (
            "value_model_path",
            If(|a| !a.is_absent(), "a copy of the policy with a value head", &To(folder, "critic.model.path")),
        ),
        ("response_length", To(size, "rollout.response_length")),
        ("num_ppo_epochs", Same("update.ppo_epochs")),
        ("num_mini_batches", By(mini_batches)),
        ("total_episodes", By(episodes)),
        ("kl_coef", By(|a| a.number().map_or_else(|| a.wrong("a number"), kl))),
        ("kl_estimator", Same("objective.kl_penalty")),
        ("cliprange", By(clip)),
        ("cliprange_value", Same("critic.cliprange_value")),
        ("vf_coef", NotNeeded("with a separate optimizer a constant factor does not change AdamW's updates")),
        ("gamma", Same("objective.gamma")),
        ("lam", Same("objective.lam")),
        ("whiten_rewards", Off("rewards are not whitened; a reward's `normalize: true` subtracts its running mean")),
        ("missing_eos_penalty", Off("a reward {kind: length, max: TOKENS} pays less to truncated completions")),
        ("stop_token", By(stop)),
        ("stop_token_id", Off(STOPS)),
        ("local_rollout_forward_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
        ("num_sample_generations", NotNeeded("samples.jsonl has every completion")),
        // PPOTrainer makes the run's name of it
        ("exp_name", To(tracked, "trainer.experiment_name")),
        ("model_adapter_name", Off("one set of adapters: model.lora")),
        ("ref_adapter_name", Off("the reference is the base model if adapters are trained")),
        ("world_size num_total_batches {,micro_,local_,mini_,local_mini_}batch_size", NotNeeded(FOLLOWS)),
    ],
);

fn judge(asked: &SourceKey) -> MappedKey {
    asked.text().map_or_else(|| asked.wrong("a model's folder or name"), |folder| reward_model(asked.facts, folder))
}

fn mini_batches(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    match batch.mini_prompts() {
        Some(mini) => set("update.ppo_mini_batch_size", mini).noted(batch.note()),
        None => asked.wrong("a number that divides the batch"),
    }
}

fn episodes(asked: &SourceKey) -> MappedKey {
    let each = BatchSizes::of(asked.facts).completions.max(1);
    match asked.count() {
        Some(n) => set("trainer.steps", (n as u64).div_ceil(each)).noted(format!("{n} completions, {each} a step")),
        None => not_needed("set by num_train_epochs"),
    }
}

fn clip(asked: &SourceKey) -> MappedKey {
    asked.number().map_or_else(
        || asked.wrong("a number"),
        |range| set_all(["low", "high"].map(|side| (format!("objective.clip_ratio_{side}"), json!(range)))),
    )
}

fn stop(asked: &SourceKey) -> MappedKey {
    if matches!(asked.text(), Some("eos") | None) {
        not_needed("an end token ends a completion")
    } else {
        cannot(STOPS)
    }
}

/// The learning rate, which policy and critic share in TRL's PPO.
pub(super) fn learning_rate(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        None => asked.wrong("a number"),
        Some(rate) if class(asked.facts) == Class::Ppo => {
            set_all([("optim.lr", json!(rate)), ("critic.optim.lr", json!(rate))])
                .noted("TRL has one optimizer for policy and critic")
        }
        Some(rate) => set("optim.lr", rate),
    }
}
