//! What TRL's configurations inherit from transformers' `TrainingArguments`, and the devices that launchers name.

use super::batch::{BatchSizes, devices};
use super::class::{Class, class};
use crate::common::{epochs, ranks};
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: accumulation betas named_devices passes per_device processes schedule warmup_rounds;
    To: both in_rounds;
    Holds: evaluates_by_steps knows_devices;
};

/// The prompts of a step, out of the completions of a device.
fn per_device(source: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(source.facts);
    let Some(each) = source.count() else {
        return source.wrong("a number of completions");
    };
    let Some(prompts) = batch.prompts() else {
        return cannot(batch.broken());
    };
    let mut all = vec![("trainer.train_batch_size", json!(prompts)), ("memory.micro_batch_size", json!(each))];
    let mut note = batch.note();
    match batch.mini_prompts() {
        Some(mini) => all.push(("update.ppo_mini_batch_size", json!(mini))),
        None => note = format!("{note}; {}", batch.one_step()),
    }
    set_all(all).noted(note)
}

/// What accumulates is part of the batch sizes.
fn accumulation(source: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(source.facts);
    match (batch.part_of_broken(), source.count(), batch.mini_prompts()) {
        (Some(part), _, _) => part,
        (_, None, _) => source.wrong("a number of micro-batches"),
        (_, _, Some(mini)) => {
            set("update.ppo_mini_batch_size", mini).noted(format!("{} completions an optimizer step", batch.mini))
        }
        (_, _, None) => cannot(batch.one_step()),
    }
}

/// A setting of the optimizer, which is the critic's too where there is one.
fn both(source: &SourceKey, key: &str) -> MappedKey {
    both_have(source, key, &plain(source.value))
}

fn both_have(source: &SourceKey, key: &str, value: &Value) -> MappedKey {
    let critic = (class(source.facts) == Class::Ppo).then(|| format!("critic.optim.{key}"));
    set_all(critic.into_iter().chain([format!("optim.{key}")]).map(|key| (key, value.clone())))
}

fn betas(source: &SourceKey) -> MappedKey {
    let of = |key, default| source.facts.number(key).unwrap_or(default);
    both_have(source, "betas", &json!([of("adam_beta1", 0.9), of("adam_beta2", 0.999)]))
}

fn schedule(source: &SourceKey) -> MappedKey {
    match source.key.split_once('.') {
        Some((_, key)) => both(source, &format!("lr_scheduler.{key}")),
        None => absent(),
    }
}

/// A number of optimizer steps as steps of the run, and what there is to say of it.
fn rounds(source: &SourceKey) -> (u64, String) {
    let steps = source.number().unwrap_or_default() as u64;
    let batch = BatchSizes::of(source.facts);
    let each = batch.optimizer_steps();
    let note = if each == 1 { String::new() } else { format!("{steps} optimizer steps, {each} a step of the run") };
    (batch.rounds(steps), note)
}

fn in_rounds(source: &SourceKey, key: &str) -> MappedKey {
    let (steps, note) = rounds(source);
    set(key, steps).noted(note)
}

fn warmup_rounds(source: &SourceKey) -> MappedKey {
    let (steps, note) = rounds(source);
    both_have(source, "lr_scheduler.warmup_steps", &steps.into()).noted(note)
}

/// Whether validation runs at an interval of steps.
fn evaluates_by_steps(source: &SourceKey) -> bool {
    source.facts.text("eval_strategy").or(source.facts.text("evaluation_strategy")) == Some("steps")
}

fn passes(source: &SourceKey) -> MappedKey {
    let longer = |key| source.facts.whole(key).is_some_and(|n| n > 0);
    if longer("max_steps") || longer("total_episodes") {
        return not_needed("max_steps or total_episodes is given");
    }
    let batch = BatchSizes::of(source.facts);
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
