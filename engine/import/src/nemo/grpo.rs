//! `NeMo RL`'s rounds of GRPO and PPO, and their losses.

use crate::common::{epochs, trackers};
use crate::facts::{Facts, number, truth, whole};
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: correction loggers passes policy_loss shaping steps;
    Is: estimator switch;
};

/// Returns true if the run is PPO.
pub(super) fn is_ppo(facts: &Facts) -> bool {
    facts.has_below("ppo.") || facts.has_below("value.")
}

/// A key of the algorithm's section.
pub(super) fn algorithm_key<'a>(facts: &'a Facts, name: &str) -> Option<&'a Value> {
    ["grpo", "ppo"].iter().find_map(|section| facts.value(&format!("{section}.{name}")))
}

fn algorithm_number(source: &SourceKey, name: &str) -> Option<i64> {
    algorithm_key(source.facts, name).and_then(whole)
}

/// Numbers of steps and epochs from here on (100,000, 1,000,000) stand for no limit in its configurations.
const NO_LIMIT: i64 = 100_000;

fn steps(source: &SourceKey) -> MappedKey {
    match source.count() {
        Some(n)
            if n >= NO_LIMIT && algorithm_number(source, "max_num_epochs").is_some_and(|epochs| epochs < NO_LIMIT) =>
        {
            not_needed("set by max_num_epochs")
        }
        Some(n) => set("trainer.steps", n),
        None => source.wrong("a number of steps"),
    }
}

fn passes(source: &SourceKey) -> MappedKey {
    let prompts = algorithm_number(source, "num_prompts_per_step").and_then(|n| u64::try_from(n).ok());
    match source.number() {
        Some(n)
            if algorithm_number(source, "max_num_steps")
                .is_some_and(|steps| steps < NO_LIMIT || n >= NO_LIMIT as f64) =>
        {
            not_needed("max_num_steps is given")
        }
        Some(n) if n > 0.0 => epochs(source.facts, n, prompts.unwrap_or(32)),
        _ => source.wrong("a number of passes over the rows"),
    }
}

/// A switch of the estimator, or else of the algorithm's section; on by default.
fn switch(source: &SourceKey, name: &str) -> bool {
    let value = algorithm_key(source.facts, &format!("adv_estimator.{name}"));
    value.or_else(|| algorithm_key(source.facts, name)).is_none_or(|value| truth(value) == Some(true))
}

/// Returns true if the estimator has a name.
fn estimator(source: &SourceKey, name: &str) -> bool {
    let default = if is_ppo(source.facts) { "gae" } else { "grpo" };
    algorithm_key(source.facts, "adv_estimator.name").and_then(Value::as_str).unwrap_or(default) == name
}

fn shaping(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    let parameter = |key: &str| source.sibling(key).and_then(number);
    if parameter("stop_properly_penalty_coef").is_some() {
        return not_needed("stop_properly_penalty_coef takes the place of the penalty for length");
    }
    let Some(buffer) = parameter("overlong_buffer_length") else {
        return cannot("overlong_buffer_length is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let weight = parameter("overlong_buffer_penalty").unwrap_or(1.0);
    let mut reward = json!({"kind": "length", "buffer": buffer as u64, "weight": weight});
    if let Some(limit) = parameter("max_response_length") {
        reward["limit"] = json!(limit as u64);
    }
    set("task.rewards[]", reward)
}

/// A bound of weights that is never reached.
const UNBOUNDED: f64 = 1e9;

fn correction(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    let parameter = |key: &str| source.facts.number(&format!("loss_fn.truncated_importance_sampling_{key}"));
    let kind = source.facts.text("loss_fn.truncated_importance_sampling_type");
    let sequence = source.facts.is_on("loss_fn.sequence_level_importance_ratios");
    let level = if sequence { "sequence" } else { "token" };
    // before there were kinds, a ratio was the bound of a truncation
    let (form, upper, lower) = match (kind, parameter("ratio"), parameter("ratio_min")) {
        (Some("tis") | None, Some(upper), lower) => ("truncate", upper, lower),
        (Some("icepop"), Some(upper), lower) => ("mask", upper, lower),
        (Some("seq-mask-tis"), Some(upper), Some(lower)) if !sequence => {
            return set_all([
                ("objective.rollout_is", "token_truncate".into()),
                ("objective.rollout_is_threshold", UNBOUNDED.into()),
                ("objective.rollout_rs", "seq_mean_k1".into()),
                ("objective.rollout_rs_threshold", format!("{lower}_{upper}").into()),
            ])
            .with_note("whole sequences by their geometric mean");
        }
        (None, None, _) => ("truncate", UNBOUNDED, None),
        _ => return cannot("tis, icepop and seq-mask-tis with their bounds are read: objective.rollout_is"),
    };
    let lower = lower.map(|lower| ("objective.rollout_is_threshold_lower", lower.into()));
    let form = ("objective.rollout_is", format!("{level}_{form}").into());
    set_all([form, ("objective.rollout_is_threshold", upper.into())].into_iter().chain(lower))
}

fn policy_loss(source: &SourceKey) -> MappedKey {
    let is_on = |key: &str| source.facts.is_on(&format!("loss_fn.{key}"));
    let loss = if is_on("use_cispo") { "cispo" } else { "clip" };
    set("objective.policy_loss", if is_on("disable_ppo_ratio") { "reinforce" } else { loss })
}

/// Enabled trackers.
fn loggers(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return not_needed("off");
    }
    let is_on = |name: &&str| source.facts.is_on(&format!("logger.{name}_enabled"));
    let names: Vec<&str> = ["tensorboard", "wandb", "mlflow", "swanlab"].into_iter().filter(is_on).collect();
    trackers(&source.with(&json!(names)))
}
