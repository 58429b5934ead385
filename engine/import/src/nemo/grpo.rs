//! `NeMo RL`'s rounds of GRPO and PPO, and their losses.

use crate::common::{epochs, trackers};
use crate::facts::{Facts, number as real, truth, whole};
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: correction loggers passes policy_loss shaping steps;
    Holds: has_baseline is_gae is_grpo is_reinforce leaves_one_out normalizes;
};

/// Whether it is PPO that runs.
pub(super) fn is_ppo(facts: &Facts) -> bool {
    facts.has_below("ppo.") || facts.has_below("value.")
}

/// A key of the algorithm's section.
pub(super) fn of_run<'a>(facts: &'a Facts, name: &str) -> Option<&'a Value> {
    ["grpo", "ppo"].iter().find_map(|section| facts.value(&format!("{section}.{name}")))
}

/// Its configurations write a number of steps or epochs that is never reached: 100,000, 1,000,000.
const NEVER: i64 = 100_000;

fn number(source: &SourceKey, name: &str) -> Option<i64> {
    of_run(source.facts, name).and_then(whole)
}

fn steps(source: &SourceKey) -> MappedKey {
    match source.count() {
        Some(n) if n >= NEVER && number(source, "max_num_epochs").is_some_and(|epochs| epochs < NEVER) => {
            not_needed("set by max_num_epochs")
        }
        Some(n) => set("trainer.steps", n),
        None => source.wrong("a number of steps"),
    }
}

fn passes(source: &SourceKey) -> MappedKey {
    let prompts = number(source, "num_prompts_per_step").and_then(|n| u64::try_from(n).ok());
    match source.number() {
        Some(n) if number(source, "max_num_steps").is_some_and(|steps| steps < NEVER || n >= NEVER as f64) => {
            not_needed("max_num_steps is given")
        }
        Some(n) if n > 0.0 => epochs(source.facts, n, prompts.unwrap_or(32)),
        _ => source.wrong("a number of passes over the rows"),
    }
}

/// A switch of the estimator, which has those of `grpo` where it has none of its own.
fn of_estimator(source: &SourceKey, name: &str) -> bool {
    let own = of_run(source.facts, &format!("adv_estimator.{name}")).or_else(|| of_run(source.facts, name));
    own.is_none_or(|own| truth(own) == Some(true))
}

fn estimator_name<'a>(source: &SourceKey<'a>) -> &'a str {
    let default = if is_ppo(source.facts) { "gae" } else { "grpo" };
    of_run(source.facts, "adv_estimator.name").and_then(Value::as_str).unwrap_or(default)
}

fn is_gae(source: &SourceKey) -> bool {
    estimator_name(source) == "gae"
}

fn is_grpo(source: &SourceKey) -> bool {
    estimator_name(source) == "grpo"
}

fn is_reinforce(source: &SourceKey) -> bool {
    estimator_name(source) == "reinforce_plus_plus"
}

fn has_baseline(source: &SourceKey) -> bool {
    of_estimator(source, "minus_baseline")
}

fn leaves_one_out(source: &SourceKey) -> bool {
    of_estimator(source, "use_leave_one_out_baseline")
}

fn normalizes(source: &SourceKey) -> bool {
    of_estimator(source, "normalize_rewards")
}

fn shaping(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    let of = |key: &str| source.beside(key).and_then(real);
    if of("stop_properly_penalty_coef").is_some() {
        return not_needed("stop_properly_penalty_coef takes the place of the penalty for length");
    }
    let Some(buffer) = of("overlong_buffer_length") else {
        return cannot("overlong_buffer_length is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let weight = of("overlong_buffer_penalty").unwrap_or(1.0);
    let mut reward = json!({"kind": "length", "buffer": buffer as u64, "weight": weight});
    if let Some(limit) = of("max_response_length") {
        reward["limit"] = json!(limit as u64);
    }
    set("task.rewards[]", reward)
}

/// As good as no bound of a weight.
const UNBOUNDED: f64 = 1e9;

fn correction(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    let of = |key: &str| source.facts.number(&format!("loss_fn.truncated_importance_sampling_{key}"));
    let kind = source.facts.text("loss_fn.truncated_importance_sampling_type");
    let sequence = source.facts.is_on("loss_fn.sequence_level_importance_ratios");
    let level = if sequence { "sequence" } else { "token" };
    // before there were kinds, a ratio was the bound of a truncation
    let (form, upper, lower) = match (kind, of("ratio"), of("ratio_min")) {
        (Some("tis") | None, Some(upper), lower) => ("truncate", upper, lower),
        (Some("icepop"), Some(upper), lower) => ("mask", upper, lower),
        (Some("seq-mask-tis"), Some(upper), Some(lower)) if !sequence => {
            return set_all([
                ("objective.rollout_is", "token_truncate".into()),
                ("objective.rollout_is_threshold", UNBOUNDED.into()),
                ("objective.rollout_rs", "seq_mean_k1".into()),
                ("objective.rollout_rs_threshold", format!("{lower}_{upper}").into()),
            ])
            .noted("whole sequences by their geometric mean");
        }
        (None, None, _) => ("truncate", UNBOUNDED, None),
        _ => return cannot("tis, icepop and seq-mask-tis with their bounds are read: objective.rollout_is"),
    };
    let lower = lower.map(|lower| ("objective.rollout_is_threshold_lower", lower.into()));
    let form = ("objective.rollout_is", format!("{level}_{form}").into());
    set_all([form, ("objective.rollout_is_threshold", upper.into())].into_iter().chain(lower))
}

fn policy_loss(source: &SourceKey) -> MappedKey {
    let on = |key: &str| source.facts.is_on(&format!("loss_fn.{key}"));
    let loss = if on("use_cispo") { "cispo" } else { "clip" };
    set("objective.policy_loss", if on("disable_ppo_ratio") { "reinforce" } else { loss })
}

/// Trackers that are on.
fn loggers(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return not_needed("off");
    }
    let on = |name: &&str| source.facts.is_on(&format!("logger.{name}_enabled"));
    let names: Vec<&str> = ["tensorboard", "wandb", "mlflow", "swanlab"].into_iter().filter(on).collect();
    trackers(&source.with(&json!(names)))
}
