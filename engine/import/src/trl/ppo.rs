//! The arguments that `PPOConfig` alone has.

use super::batch::BatchSizes;
use super::class::{Class, class};
use crate::common::{model, path, size, tracked};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, set, set_noted};
use serde_json::json;

const FOLLOWS: &str = "it follows from the batch sizes";

pub(super) const TABLE: &[KeyRule] = &[
    ("sft_model_path", By(model)),
    ("reward_model_path", By(judge)),
    ("value_model_path", By(critic_path)),
    ("response_length", By(|a| size(a, "rollout.response_length"))),
    ("num_ppo_epochs", Same("update.ppo_epochs")),
    ("num_mini_batches", By(mini_batches)),
    ("total_episodes", By(episodes)),
    ("kl_coef", By(kl)),
    ("kl_estimator", Same("objective.kl_penalty")),
    ("cliprange", By(clip)),
    ("cliprange_value", Same("critic.cliprange_value")),
    ("vf_coef", NotNeeded("the critic has a separate optimizer, and a constant factor does not change AdamW updates")),
    ("gamma", Same("objective.gamma")),
    ("lam", Same("objective.lam")),
    ("whiten_rewards", Off("rewards are not whitened; a reward's `normalize: true` subtracts its running mean")),
    (
        "missing_eos_penalty",
        Off("{kind: length, max: TOKENS} as a reward, with a weight, pays less to completions that ran into the limit"),
    ),
    ("stop_token", By(stop)),
    ("stop_token_id", Off("rollout.stop takes strings that end a completion, in addition to the model's end tokens")),
    ("local_rollout_forward_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
    ("num_sample_generations", NotNeeded("samples.jsonl has every completion")),
    // PPOTrainer makes the run's name of it
    ("exp_name", By(|a| tracked(a, "trainer.experiment_name"))),
    ("model_adapter_name", Off("one set of adapters: model.lora")),
    ("ref_adapter_name", Off("the reference is the base model if adapters are trained")),
    ("world_size", NotNeeded(FOLLOWS)),
    ("num_total_batches", NotNeeded(FOLLOWS)),
    ("micro_batch_size", NotNeeded(FOLLOWS)),
    ("local_batch_size", NotNeeded(FOLLOWS)),
    ("batch_size", NotNeeded(FOLLOWS)),
    ("local_mini_batch_size", NotNeeded(FOLLOWS)),
    ("mini_batch_size", NotNeeded(FOLLOWS)),
];

fn judge(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(folder) => set("task.rewards[]", json!({"kind": "model", "path": path(asked.facts, folder)})),
        None => asked.wrong("a model's folder or name"),
    }
}

fn critic_path(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(folder) => set("critic.model.path", path(asked.facts, folder)),
        None => not_needed("a copy of the policy with a value head"),
    }
}

fn mini_batches(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    match batch.mini_prompts() {
        Some(mini) => set_noted("update.ppo_mini_batch_size", mini, batch.note()),
        None => asked.wrong("a number that divides the batch"),
    }
}

fn episodes(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    match asked.whole().and_then(|n| u64::try_from(n).ok()) {
        Some(n) if n > 0 => set_noted(
            "trainer.steps",
            n.div_ceil(batch.completions.max(1)),
            format!("{n} completions, {} a step", batch.completions),
        ),
        _ => not_needed("set by num_train_epochs"),
    }
}

fn kl(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(coefficient) if coefficient > 0.0 => MappedKey::Set(
            vec![
                ("objective.use_kl_in_reward".into(), json!(true)),
                ("objective.kl_ctrl.kl_coef".into(), json!(coefficient)),
            ],
            String::new(),
        ),
        Some(_) => not_needed("0: no KL, as here by default"),
        None => asked.wrong("a number"),
    }
}

fn clip(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(range) => MappedKey::Set(
            vec![("objective.clip_ratio_low".into(), json!(range)), ("objective.clip_ratio_high".into(), json!(range))],
            String::new(),
        ),
        None => asked.wrong("a number"),
    }
}

fn stop(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("eos") | None => not_needed("an end token ends a completion"),
        Some(_) => cannot("rollout.stop takes strings that end a completion, in addition to the model's end tokens"),
    }
}

/// The learning rate, which policy and critic share in TRL's PPO.
pub(super) fn learning_rate(asked: &SourceKey) -> MappedKey {
    let Some(rate) = asked.number() else {
        return asked.wrong("a number");
    };
    if class(asked.facts) != Class::Ppo {
        return set("optim.lr", rate);
    }
    MappedKey::Set(
        vec![("optim.lr".into(), json!(rate)), ("critic.optim.lr".into(), json!(rate))],
        "TRL has one optimizer for policy and critic".into(),
    )
}
