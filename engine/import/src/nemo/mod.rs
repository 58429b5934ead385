//! `NeMo RL`'s keys and what they become: those of its memory guide, and those of its GRPO and PPO configurations (2025
//! and 2026).

mod data;
mod grpo;
mod optimizer;
mod policy;

use super::assembly::Assembly;
use super::facts::Facts;
use super::rules::Functions;
use grpo::{is_ppo, of_run};
use serde_json::{Value, json};

/// Functions of the table `rules/nemo.txt`.
pub(super) const FUNCTIONS: [Functions; 4] =
    [data::FUNCTIONS, grpo::FUNCTIONS, optimizer::FUNCTIONS, policy::FUNCTIONS];

/// Whether the files say what a run does, and not only how it uses memory.
fn is_run(facts: &Facts) -> bool {
    is_ppo(facts) || facts.has_below("grpo.") || facts.has_below("loss_fn.")
}

/// Validation samples as training does where a file does not say.
pub(super) fn defaults(facts: &Facts) -> Vec<(String, Value)> {
    let of = |(name, default): (&str, Value)| {
        let value = facts.value(&format!("policy.generation.{name}")).cloned();
        (format!("policy.generation.val_{name}"), value.unwrap_or(default))
    };
    let names = [("temperature", json!(1.0)), ("top_p", json!(1.0)), ("top_k", Value::Null)];
    if is_run(facts) { names.map(of).into() } else { Vec::new() }
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
