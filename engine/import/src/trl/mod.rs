//! TRL's arguments (2025 and 2026) and what they become: `GRPOConfig`, `RLOOConfig`, `PPOConfig`, what they inherit
//! from transformers' `TrainingArguments`, a trainer's own arguments, PEFT's, and Accelerate's.

mod batch;
mod class;
mod grpo;
mod launch;
mod model;
mod open_r1;
mod ppo;
mod refusal;
mod rewards;
mod training;

use super::assembly::Assembly;
use super::facts::Facts;
use super::key_mapping::KeyTable;
use super::literal::settings;
use batch::{BatchSizes, devices};
use class::{Class, class};
pub(super) use refusal::refusal;
use serde_json::{Value, json};

/// All tables.
pub(super) const TABLES: &[KeyTable] =
    &[grpo::TABLE, ppo::TABLE, training::TABLE, model::TABLE, model::TRAINER, launch::ACCELERATE, open_r1::TABLE];

/// What TRL does where a file does not say, as far as it sets something here.
pub(super) fn defaults(facts: &Facts) -> Vec<(String, Value)> {
    let class = class(facts);
    let mut all = vec![(super::python::CLASS.to_owned(), json!(class.name()))];
    let mut add = |text: &str| all.extend(settings("", text));
    add("per_device_train_batch_size=8 gradient_accumulation_steps=1 lr_scheduler_type=linear weight_decay=0.0");
    add("gradient_checkpointing=true save_steps=500 seed=42");
    // with neither of the three it computes in bf16
    if !facts.is_on("fp16") && !facts.is_on("use_cpu") {
        add("bf16=true");
    }
    add(match class {
        Class::Ppo => {
            "learning_rate=3e-6 response_length=53 temperature=0.7 num_ppo_epochs=4 num_mini_batches=1 kl_coef=0.05 \
             cliprange=0.2 cliprange_value=0.2 lam=0.95"
        }
        Class::Rloo => "learning_rate=1e-6 max_completion_length=512 num_generations=2 beta=0.05 epsilon=0.2",
        Class::Grpo => "learning_rate=1e-6 max_completion_length=512 num_generations=8 loss_type=dapo epsilon=0.2",
    });
    if class == Class::Grpo && facts.is_on("use_vllm") {
        add("vllm_importance_sampling_correction=true vllm_importance_sampling_mode=sequence_mask");
        add("vllm_importance_sampling_clip_max=3.0");
    }
    all
}

/// What follows from the sizes of batches.
pub(super) fn batches(facts: &Facts, into: &mut Assembly) {
    let batch = BatchSizes::of(facts);
    if batch.prompts().is_none() {
        let what = format!("completions of a round / num_generations: {}", batch.broken());
        into.need("trainer.train_batch_size", batch.completions.div_ceil(batch.group), &what);
    } else if devices(facts).is_none() {
        into.adjusted
            .push("the files do not give the number of devices, taken to be 1: pass --devices N for another".into());
    }
}

/// What follows from other keys together.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    into.put("task.kind", json!("dataset"));
    into.rewards.extend(rewards::of_parts(facts));
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
    let is_named = |key: &str| facts.keys().any(|own| own == key || own.ends_with(&format!("Trainer.{key}")));
    // an environment may own its rows and its reward
    let plays = into.has("task.environment");
    into.has_no_rows = plays && !is_named("train_dataset") && !is_named("dataset_name");
    let lists = ["reward_funcs", "reward_model_name_or_path", "reward_model_path"];
    if into.rewards.is_empty() && plays && !lists.into_iter().any(is_named) {
        into.put("task.rewards", json!([]));
    } else if into.rewards.is_empty() {
        into.need("task.rewards", json!([{"kind": "exact"}]), "what grades a completion, in place of reward_funcs");
        into.need("task.answer_field", "answer", "the column that has the answer");
    } else if into.rewards.iter().any(needs_answer) {
        into.put("task.answer_field", json!("solution"));
    }
}
