//! `NeMo RL`'s keys and what they become: those of its memory guide, and those of its GRPO and PPO configurations (2025
//! and 2026).

mod data;
mod grpo;
mod optimizer;
mod policy;
mod value;

use super::assembly::Assembly;
use super::facts::Facts;
use super::key_mapping::KeyTable;
use super::literal::settings;
use grpo::{is_ppo, of_run};
use serde_json::{Value, json};

/// All tables.
pub(super) const TABLES: &[KeyTable] = &[
    policy::TABLE,
    optimizer::TABLE,
    optimizer::OF_VALUE,
    grpo::TABLE,
    grpo::OF_PPO,
    grpo::LOSS,
    grpo::AROUND,
    value::ROUNDS,
    value::TABLE,
    value::LOSS,
    data::TABLE,
];

/// Sections of runs that are not imported, and what they are of.
const OTHERS: [(&str, &str); 4] = [
    ("sft.", "supervised training: write a section `sft` for `firebrick sft` (docs/reference/configuration.md)"),
    ("dpo.", "DPO, which Firebrick does not have"),
    ("rm.", "a reward model's training, which Firebrick does not have"),
    ("distillation.", "distillation, which Firebrick does not have"),
];

/// Why the files are of a run that is not imported, where they are.
pub(super) fn refusal(facts: &Facts) -> Option<String> {
    let (section, what) = OTHERS.iter().find(|(section, _)| facts.has_below(section))?;
    Some(format!("only NeMo RL's GRPO and PPO runs are imported, and `{}` is of {what}", section.trim_end_matches('.')))
}

/// Whether the files say what a run does, and not only how it uses memory.
fn is_run(facts: &Facts) -> bool {
    is_ppo(facts) || facts.has_below("grpo.") || facts.has_below("loss_fn.")
}

/// What it does where a file does not say (`GRPOConfig`, `PPOConfig`, `ClippedPGLossConfig`).
pub(super) fn defaults(facts: &Facts) -> Vec<(String, Value)> {
    if !is_run(facts) {
        return Vec::new();
    }
    let mut all = if is_ppo(facts) {
        settings(
            "ppo.",
            "num_prompts_per_step=32 num_generations_per_prompt=16 val_period=20 val_at_start=true \
             max_val_samples=256 seed=42 ppo_epochs=4 adv_estimator.name=gae adv_estimator.gae_lambda=0.95 \
             adv_estimator.gae_gamma=1.0",
        )
    } else {
        settings(
            "grpo.",
            "num_prompts_per_step=32 num_generations_per_prompt=16 max_num_epochs=1 normalize_rewards=true \
             use_leave_one_out_baseline=true val_period=10 val_at_start=false max_val_samples=256 seed=42",
        )
    };
    all.extend(settings(
        "loss_fn.",
        "reference_policy_kl_penalty=0.01 reference_policy_kl_type=k3 ratio_clip_min=0.2 ratio_clip_max=0.2 \
         ratio_clip_c= token_level_loss=true",
    ));
    if is_ppo(facts) {
        all.push(("value_loss_fn.cliprange".into(), Value::Null));
    }
    // validation samples as training does
    for (name, default) in [("temperature", json!(1.0)), ("top_p", json!(1.0)), ("top_k", Value::Null)] {
        let own = facts.value(&format!("policy.generation.{name}")).cloned();
        all.push((format!("policy.generation.val_{name}"), own.unwrap_or(default)));
    }
    all
}

/// What follows from several keys: what grades completions, which parameters decay.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    if !is_run(facts) {
        return;
    }
    // Megatron leaves norms and biases out, as here
    for (model, ours) in [("policy", "optim"), ("value", "critic.optim")] {
        if (model == "policy" || is_ppo(facts)) && !facts.is_on(&format!("{model}.megatron_cfg.enabled")) {
            into.put(&format!("{ours}.decay_norms_and_biases"), json!(true));
        }
    }
    // what only adds to a reward is none by itself
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let kinds = [("env.math.", "math"), ("env.dapo.", "verl_math")];
        let kind = kinds.iter().find(|(env, _)| facts.has_below(env)).map_or("exact", |(_, kind)| kind);
        let mut reward = json!({"kind": kind});
        let scaling = |key: &str| of_run(facts, &format!("reward_scaling.{key}"));
        if scaling("enabled").and_then(super::facts::truth) == Some(true) {
            let of = |key: &str, default: f64| scaling(key).and_then(super::facts::number).unwrap_or(default);
            let (low, high) = (of("source_min", 0.0), of("source_max", 1.0));
            if high > low {
                reward["weight"] = json!((of("target_max", 1.0) - of("target_min", 0.0)) / (high - low));
                reward["clip"] = json!([low, high]);
            }
        }
        into.rewards.insert(0, reward);
        into.replace_rewards("what grades a completion, in place of NeMo RL's environment");
        into.need("task.answer_field", "answer", "the field that has the answer");
        // groups are compared by what the environment paid, without the penalty
        let filters = of_run(facts, "use_dynamic_sampling").and_then(super::facts::truth) == Some(true);
        if into.rewards.len() > 1 && filters {
            into.put("rollout.dynamic_sampling.metric", json!(kind));
        }
    }
}
