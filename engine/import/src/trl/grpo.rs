//! The arguments of `GRPOConfig`, `RLOOConfig` and `PPOConfig`.

use super::batch::BatchSizes;
use super::class::algorithm;
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: episodes generation mini_batches stop validation;
    Is: algorithm;
};

fn generation(source: &SourceKey) -> MappedKey {
    if source.is_absent() {
        return absent();
    }
    let batch = BatchSizes::new(source.facts);
    batch.part_of_broken().unwrap_or_else(|| not_needed(format!("it is in trainer.train_batch_size: {}", batch.note())))
}

/// TRL samples completions in validation as in training.
fn validation(source: &SourceKey) -> MappedKey {
    let temperature = source.facts.number("temperature").unwrap_or(1.0);
    source.count().map_or_else(absent, |n| {
        set_all([("rollout.val_kwargs.n", n.into()), ("rollout.val_kwargs.temperature", temperature.into())])
    })
}

fn stop(source: &SourceKey) -> MappedKey {
    match source.value {
        Value::String(text) => set("rollout.stop", json!([text])),
        Value::Array(texts) if texts.iter().all(Value::is_string) => set("rollout.stop", texts.clone()),
        _ => source.off_or_wrong("strings"),
    }
}

fn mini_batches(source: &SourceKey) -> MappedKey {
    let batch = BatchSizes::new(source.facts);
    match batch.mini_prompts() {
        Some(mini) => set("update.ppo_mini_batch_size", mini).with_note(batch.note()),
        None => source.wrong("a number that divides the batch"),
    }
}

fn episodes(source: &SourceKey) -> MappedKey {
    let completions = BatchSizes::new(source.facts).completions.max(1);
    match source.count() {
        Some(n) => set("trainer.steps", (n as u64).div_ceil(completions))
            .with_note(format!("{n} completions, {completions} a step")),
        None => not_needed("set by num_train_epochs"),
    }
}
