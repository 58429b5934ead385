//! Keys that TRL's configurations inherit from transformers' `TrainingArguments`, and launchers' devices.

use super::batch::{BatchSizes, devices};
use super::class::{Class, class};
use crate::common::{epochs, ranks};
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: accumulation betas named_devices passes per_device processes schedule warmup_rounds;
    To: in_rounds optimizer_key;
    Holds: evaluates_by_steps knows_devices;
};

/// Prompts of a step from the completions per device.
fn per_device(source: &SourceKey) -> MappedKey {
    let batch = BatchSizes::new(source.facts);
    let Some(completions) = source.count() else {
        return source.wrong("a number of completions");
    };
    let Some(prompts) = batch.prompts() else {
        return cannot(batch.broken());
    };
    let mut settings =
        vec![("trainer.train_batch_size", json!(prompts)), ("memory.micro_batch_size", json!(completions))];
    let mut note = batch.note();
    match batch.mini_prompts() {
        Some(mini) => settings.push(("update.ppo_mini_batch_size", json!(mini))),
        None => note = format!("{note}; {}", batch.one_step()),
    }
    set_all(settings).with_note(note)
}

/// Gradient accumulation is part of the batch sizes.
fn accumulation(source: &SourceKey) -> MappedKey {
    let batch = BatchSizes::new(source.facts);
    match (batch.part_of_broken(), source.count(), batch.mini_prompts()) {
        (Some(part), _, _) => part,
        (_, None, _) => source.wrong("a number of micro-batches"),
        (_, _, Some(mini)) => {
            set("update.ppo_mini_batch_size", mini).with_note(format!("{} completions an optimizer step", batch.mini))
        }
        (_, _, None) => cannot(batch.one_step()),
    }
}

/// A setting of the policy's optimizer, and of the critic's if there is one.
fn optimizer_key(source: &SourceKey, key: &str) -> MappedKey {
    set_optimizers(source, key, &plain(source.value))
}

fn set_optimizers(source: &SourceKey, key: &str, value: &Value) -> MappedKey {
    let critic = (class(source.facts) == Class::Ppo).then(|| format!("critic.optim.{key}"));
    set_all(critic.into_iter().chain([format!("optim.{key}")]).map(|key| (key, value.clone())))
}

fn betas(source: &SourceKey) -> MappedKey {
    let number = |key, default| source.facts.number(key).unwrap_or(default);
    set_optimizers(source, "betas", &json!([number("adam_beta1", 0.9), number("adam_beta2", 0.999)]))
}

fn schedule(source: &SourceKey) -> MappedKey {
    match source.key.split_once('.') {
        Some((_, key)) => optimizer_key(source, &format!("lr_scheduler.{key}")),
        None => absent(),
    }
}

/// Steps of the run for a number of optimizer steps, with a note.
fn rounds(source: &SourceKey) -> (u64, String) {
    let steps = source.number().unwrap_or_default() as u64;
    let batch = BatchSizes::new(source.facts);
    let per_step = batch.optimizer_steps();
    let note =
        if per_step == 1 { String::new() } else { format!("{steps} optimizer steps, {per_step} a step of the run") };
    (batch.rounds(steps), note)
}

fn in_rounds(source: &SourceKey, key: &str) -> MappedKey {
    let (steps, note) = rounds(source);
    set(key, steps).with_note(note)
}

fn warmup_rounds(source: &SourceKey) -> MappedKey {
    let (steps, note) = rounds(source);
    set_optimizers(source, "lr_scheduler.warmup_steps", &steps.into()).with_note(note)
}

/// Returns true if validation runs at an interval of steps.
fn evaluates_by_steps(source: &SourceKey) -> bool {
    source.facts.text("eval_strategy").or(source.facts.text("evaluation_strategy")) == Some("steps")
}

fn passes(source: &SourceKey) -> MappedKey {
    let is_set = |key| source.facts.whole(key).is_some_and(|n| n > 0);
    if is_set("max_steps") || is_set("total_episodes") {
        return not_needed("max_steps or total_episodes is given");
    }
    let batch = BatchSizes::new(source.facts);
    match (source.number(), batch.prompts()) {
        (Some(n), Some(prompts)) if n > 0.0 => epochs(source.facts, n, prompts),
        (Some(_), None) => cannot(batch.broken()),
        _ => source.wrong("a number of passes over the rows"),
    }
}

/// `localhost:0,1,2,3`.
fn named_devices(source: &SourceKey) -> MappedKey {
    match devices(source.facts) {
        Some(n) => ranks(&source.with(&json!(n)), "trainer.n_gpus_per_node"),
        None => source.wrong("devices such as localhost:0,1"),
    }
}

/// Processes of all machines together.
fn processes(source: &SourceKey) -> MappedKey {
    let machines = source.facts.whole("num_machines").unwrap_or(1).max(1);
    match source.count() {
        Some(n) if n % machines == 0 => ranks(&source.with(&json!(n / machines)), "trainer.n_gpus_per_node"),
        Some(n) => {
            cannot(format!("{n} processes are not as many on each of {machines} machines; give each the same number"))
        }
        None => source.wrong("a number of processes"),
    }
}

fn knows_devices(source: &SourceKey) -> bool {
    devices(source.facts).is_some()
}
