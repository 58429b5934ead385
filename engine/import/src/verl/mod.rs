//! verl's keys (its YAML and Hydra overrides, 2024 to 2026) and what they become.

mod actor;
mod algorithm;
mod critic;
mod data;
mod grading;
mod loss;
mod model;
mod multi_turn;
mod offload;
mod optimizer;
mod reference;
mod reward_model;
mod rollout;
mod trainer;
mod version;

use super::assembly::Assembly;
use super::entry::PROGRAM;
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

/// What verl does where a file does not say (`ppo_trainer.yaml` of its versions), as far as it sets something here.
pub(super) fn defaults(facts: &Facts) -> Vec<(&'static str, Value)> {
    let old = version::is_before_0_4(facts);
    // verl before 0.4 took the KL off the reward wherever it was not in the loss
    let in_loss = facts.is_on("actor_rollout_ref.actor.use_kl_loss");
    let kl_in_reward = old && !in_loss && !version::is_deepscaler(facts);
    let mut all = vec![
        ("algorithm.adv_estimator", json!("gae")),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", json!("vanilla")),
        ("actor_rollout_ref.actor.clip_ratio_low", json!(0.2)),
        ("actor_rollout_ref.actor.clip_ratio_high", json!(0.2)),
        ("actor_rollout_ref.actor.clip_ratio_c", if old { Value::Null } else { json!(3.0) }),
        ("actor_rollout_ref.actor.loss_agg_mode", json!("token-mean")),
        ("actor_rollout_ref.actor.entropy_coeff", if old { json!(0.001) } else { json!(0) }),
        ("actor_rollout_ref.actor.policy_loss.ppo_kl_coef", json!(0.1)),
        ("actor_rollout_ref.actor.use_kl_loss", json!(false)),
        ("actor_rollout_ref.actor.kl_loss_coef", json!(0.001)),
        ("actor_rollout_ref.actor.kl_loss_type", json!("low_var_kl")),
        ("algorithm.use_kl_in_reward", json!(kl_in_reward)),
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
    ];
    if version::is_search_r1(facts) {
        all.push(("actor_rollout_ref.rollout.top_p", json!(0.95)));
    }
    if version::is_deepscaler(facts) {
        all.push(("actor_rollout_ref.rollout.val_temperature", json!(0.6)));
        all.push(("actor_rollout_ref.rollout.n_val", json!(8)));
    }
    all
}

/// Why the files are not of a run that is imported: supervised training, or what only samples.
pub(super) fn refusal(facts: &Facts) -> Option<String> {
    let program = facts.text(PROGRAM).unwrap_or_default();
    let is_sft = program.contains("sft_trainer")
        || ["model.partial_pretrain", "data.prompt_dict_keys", "data.response_dict_keys", "data.multiturn."]
            .iter()
            .any(|start| facts.has_below(start));
    if is_sft {
        return Some(
            "the files are of supervised training (verl's sft_trainer), which is not imported: write a configuration with \
             a section `sft` for `firebrick sft` (docs/reference/configuration.md)"
                .into(),
        );
    }
    ["main_generation", "main_eval"].iter().any(|name| program.contains(name)).then(|| {
        format!(
            "{program} trains nothing, and its files are not imported: `firebrick generate` samples from a model, \
             `firebrick eval` evaluates one"
        )
    })
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
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let (reward, sure) = grading::guess(facts);
        into.rewards.insert(0, reward);
        if !sure {
            into.replace_rewards("what grades a completion: verl chooses a function for each row by its data_source");
        }
    }
    output(facts, into);
}

fn output(facts: &Facts, into: &mut Assembly) {
    if into.has("output") {
        return;
    }
    let names = ["trainer.project_name", "trainer.experiment_name"];
    if names.iter().any(|name| facts.is_open(name)) {
        return;
    }
    let parts: Vec<&str> = names.iter().filter_map(|name| facts.text(name)).collect();
    if !parts.is_empty() {
        into.put("output", json!(format!("runs/{}", parts.join("/"))));
    }
}
