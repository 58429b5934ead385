//! verl's keys (its YAML and Hydra overrides, 2024 to 2026) and what they become.

mod actor;
mod algorithm;
mod critic;
mod data;
mod loss;
mod model;
mod multi_turn;
mod offload;
mod optimizer;
mod reference;
mod reward_model;
mod rollout;
mod trainer;

use super::assembly::Assembly;
use super::facts::Facts;
use super::key_mapping::KeyRule;
use serde_json::{Value, json};

/// All tables.
pub(super) const TABLES: &[&[KeyRule]] = &[
    data::TABLE,
    model::TABLE,
    actor::TABLE,
    reference::TABLE,
    rollout::TABLE,
    multi_turn::TABLE,
    algorithm::TABLE,
    critic::TABLE,
    reward_model::TABLE,
    trainer::TABLE,
];

/// What verl does where a file does not say (`ppo_trainer.yaml`), as far as it sets something here.
pub(super) fn defaults() -> Vec<(&'static str, Value)> {
    vec![
        ("algorithm.adv_estimator", json!("gae")),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", json!("vanilla")),
        ("actor_rollout_ref.actor.clip_ratio_low", json!(0.2)),
        ("actor_rollout_ref.actor.clip_ratio_high", json!(0.2)),
        ("actor_rollout_ref.actor.clip_ratio_c", json!(3.0)),
        ("actor_rollout_ref.actor.loss_agg_mode", json!("token-mean")),
        ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef", json!(0.1)),
        ("actor_rollout_ref.actor.use_kl_loss", json!(false)),
        ("actor_rollout_ref.actor.kl_loss_coef", json!(0.001)),
        ("actor_rollout_ref.actor.kl_loss_type", json!("low_var_kl")),
        ("algorithm.use_kl_in_reward", json!(false)),
        ("algorithm.kl_ctrl.kl_coef", json!(0.001)),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", json!(256)),
        ("actor_rollout_ref.actor.fsdp_config.dtype", json!("bfloat16")),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", json!(true)),
        ("actor_rollout_ref.rollout.n", json!(1)),
        ("actor_rollout_ref.model.lora_alpha", json!(16)),
        ("data.train_batch_size", json!(1024)),
        ("data.max_prompt_length", json!(512)),
        ("data.max_response_length", json!(512)),
        ("trainer.save_freq", json!(-1)),
    ]
}

/// What follows from several keys: the rows' form, what grades them, the run folder.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    into.put("task.kind", json!("dataset"));
    // verl's parameter groups are one
    into.put("optim.decay_norms_and_biases", json!(true));
    if facts.text("algorithm.adv_estimator") == Some("gae") {
        into.put("critic.optim.decay_norms_and_biases", json!(true));
    }
    into.put("task.answer_field", json!("reward_model.ground_truth"));
    // what only adds to a reward is none by itself
    let grades = |reward: &Value| reward["kind"] != "length";
    if !into.rewards.iter().any(grades) {
        let files = facts.value("data.train_files").map(Value::to_string).unwrap_or_default();
        let sections = ["custom_reward_function.path", "reward.custom_reward_function.path"];
        let custom = sections.iter().any(|key| facts.text(key).is_some());
        let (reward, sure) = guess(&files.to_ascii_lowercase());
        into.rewards.insert(0, reward);
        if custom || !sure {
            into.missing.push(super::assembly::Missing {
                key: "task.rewards".into(),
                stands_in: into.rewards[0].clone(),
                what: if custom {
                    "what grades a completion, in place of the Python function".into()
                } else {
                    "what grades a completion: verl chooses a function for each row by its data_source".into()
                },
            });
        }
    }
    output(facts, into);
}

/// What verl grades the rows of a file by, as its name tells it, and whether it does.
fn guess(files: &str) -> (Value, bool) {
    let several = files.contains(',');
    if files.contains("gsm8k") {
        return (json!({"kind": "gsm8k", "method": "strict"}), !several);
    }
    if ["math", "aime", "dapo"].iter().any(|word| files.contains(word)) {
        return (json!({"kind": "verl_math"}), false);
    }
    (json!({"kind": "exact"}), false)
}

fn output(facts: &Facts, into: &mut Assembly) {
    if into.has("output") {
        return;
    }
    let names = ["trainer.project_name", "trainer.experiment_name"];
    let parts: Vec<&str> = names.iter().filter_map(|name| facts.text(name)).collect();
    if !parts.is_empty() {
        into.put("output", json!(format!("runs/{}", parts.join("/"))));
    }
}
