//! `NeMo RL`'s keys and their conversions: its memory guide, and its GRPO and PPO configurations (2025
//! and 2026).

mod data;
mod grpo;
mod optimizer;
mod policy;

use super::assembly::Assembly;
use super::facts::Facts;
use super::rules::Functions;
use grpo::{algorithm_key, is_ppo};
use serde_json::{Value, json};

/// Functions of the table `rules/nemo.txt`.
pub(super) const FUNCTIONS: [Functions; 4] =
    [data::FUNCTIONS, grpo::FUNCTIONS, optimizer::FUNCTIONS, policy::FUNCTIONS];

/// Returns true if the files configure an algorithm, and not only its memory.
fn is_run(facts: &Facts) -> bool {
    is_ppo(facts) || facts.has_below("grpo.") || facts.has_below("loss_fn.")
}

/// Defaults of validation: it samples as training does.
pub(super) fn defaults(facts: &Facts) -> Vec<(String, Value)> {
    let default_of = |(name, default): (&str, Value)| {
        let value = facts.value(&format!("policy.generation.{name}")).cloned();
        (format!("policy.generation.val_{name}"), value.unwrap_or(default))
    };
    let names = [("temperature", json!(1.0)), ("top_p", json!(1.0)), ("top_k", Value::Null)];
    if is_run(facts) { names.map(default_of).into() } else { Vec::new() }
}

/// Adds settings that follow from several keys: the reward, the decayed parameters.
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
    // a length penalty alone grades nothing
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let kinds = [("env.math.", "math"), ("env.dapo.", "verl_math")];
        let kind = kinds.iter().find(|(env, _)| facts.has_below(env)).map_or("exact", |(_, kind)| kind);
        let mut reward = json!({"kind": kind});
        let scaling = |key: &str| algorithm_key(facts, &format!("reward_scaling.{key}"));
        if scaling("enabled").and_then(super::facts::truth) == Some(true) {
            let bound = |key: &str, default: f64| scaling(key).and_then(super::facts::number).unwrap_or(default);
            let (low, high) = (bound("source_min", 0.0), bound("source_max", 1.0));
            if high > low {
                reward["weight"] = json!((bound("target_max", 1.0) - bound("target_min", 0.0)) / (high - low));
                reward["clip"] = json!([low, high]);
            }
        }
        into.rewards.insert(0, reward);
        into.replace_rewards("what grades a completion, in place of NeMo RL's environment");
        into.need("task.answer_field", "answer", "the field that has the answer");
        // groups are compared by the environment's reward, without the penalty
        let filters = algorithm_key(facts, "use_dynamic_sampling").and_then(super::facts::truth) == Some(true);
        if into.rewards.len() > 1 && filters {
            into.put("rollout.dynamic_sampling.metric", json!(kind));
        }
    }
}
