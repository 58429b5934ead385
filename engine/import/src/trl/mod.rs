//! TRL's arguments (2025 and 2026) and their conversions: `GRPOConfig`, `RLOOConfig`, `PPOConfig`, the inherited
//! `TrainingArguments` of transformers, a trainer's own arguments, PEFT's, and Accelerate's.

mod batch;
mod class;
mod grpo;
mod model;
pub(super) mod refusal;
mod rewards;
mod training;

use super::assembly::Assembly;
use super::facts::Facts;
use super::rules::Functions;
use batch::{BatchSizes, devices};
use class::{Class, class};
pub(super) use refusal::refusal;
use serde_json::{Value, json};

/// Functions of the tables `rules/trl.txt` and `rules/trl_algorithms.txt`.
pub(super) const FUNCTIONS: [Functions; 4] =
    [grpo::FUNCTIONS, model::FUNCTIONS, rewards::FUNCTIONS, training::FUNCTIONS];

/// Adds settings that follow from batch sizes.
pub(super) fn batches(facts: &Facts, into: &mut Assembly) {
    let batch = BatchSizes::new(facts);
    if batch.prompts().is_none() {
        let what = format!("completions of a round / num_generations: {}", batch.broken());
        into.need("trainer.train_batch_size", batch.completions.div_ceil(batch.group), &what);
    } else if devices(facts).is_none() {
        into.adjusted
            .push("the files do not give the number of devices, taken to be 1: pass --devices N for another".into());
    }
}

/// Adds settings that follow from several keys.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    into.put("task.kind", json!("dataset"));
    into.rewards.extend(rewards::partial_rewards(facts));
    if class(facts) == Class::Grpo {
        into.put("objective.adv_eps", json!(1e-4));
    }
    // the dual clip is verl's: TRL has it with delta
    if !into.has("objective.clip_ratio_c") {
        into.put("objective.clip_ratio_c", Value::Null);
    }
    if !facts.is_written("max_prompt_length") {
        into.adjusted.push(
            "rollout.prompt_length is 512, and longer prompts are skipped: TRL keeps all prompts; raise it to the \
             longest"
                .into(),
        );
    }
    let needs_answer = |reward: &Value| {
        !["length", "model", "python", "trl_think_format", "regex"].iter().any(|kind| reward["kind"] == *kind)
    };
    let is_named =
        |key: &str| facts.keys().any(|written| written == key || written.ends_with(&format!("Trainer.{key}")));
    // an environment may have its own rows and reward
    let has_environment = into.has("task.environment");
    into.has_no_rows = has_environment && !is_named("train_dataset") && !is_named("dataset_name");
    let lists = ["reward_funcs", "reward_model_name_or_path", "reward_model_path"];
    if into.rewards.is_empty() && has_environment && !lists.into_iter().any(is_named) {
        into.put("task.rewards", json!([]));
    } else if into.rewards.is_empty() {
        into.need("task.rewards", json!([{"kind": "exact"}]), "what grades a completion, in place of reward_funcs");
        into.need("task.answer_field", "answer", "the column that has the answer");
    } else if into.rewards.iter().any(needs_answer) {
        into.put("task.answer_field", json!("solution"));
    }
}
