//! The names of the guide to GRPO's memory: a script's own variables.

use super::common::precision;
use super::key_mapping::prelude::*;
use serde_json::json;

/// All tables.
pub(super) const TABLES: &[KeyTable] = &[(
    "",
    &[
        ("batch_size", By(batch)),
        ("group_size", Same("rollout.n")),
        ("gradient_accumulation_steps grad_accum_steps", By(accumulation)),
        ("block_size", By(block)),
        ("dtype", By(precision)),
        ("n_layer n_embd n_head", By(|_| cannot(SIZES))),
        ("return_logits", NotNeeded("sampling keeps the log-prob of the token it drew, and no logits")),
    ],
)];

const SIZES: &str = "a model's sizes are in its config.json; for a random start write num_hidden_layers, hidden_size and \
                     num_attention_heads under model.arch";

fn accumulated(asked: &SourceKey) -> i64 {
    let steps = ["gradient_accumulation_steps", "grad_accum_steps"];
    steps.iter().find_map(|key| asked.facts.whole(key)).unwrap_or(1)
}

/// Prompts at a time, so often: the prompts of a step, and the sequences of a micro-batch.
fn batch(asked: &SourceKey) -> MappedKey {
    let (group, steps) = (asked.facts.whole("group_size").unwrap_or(1), accumulated(asked));
    match asked.count() {
        Some(prompts) if group > 0 && steps > 0 => set_all([
            ("trainer.train_batch_size", json!(prompts * steps)),
            ("memory.micro_batch_size", json!(prompts * group)),
        ])
        .noted(format!("{prompts} prompts x {steps} accumulation steps; {prompts} x {group} sequences at a time")),
        _ => asked.wrong("a number of prompts"),
    }
}

fn accumulation(asked: &SourceKey) -> MappedKey {
    match asked.count() {
        Some(steps) if asked.facts.whole("batch_size").is_none() => {
            set("trainer.train_batch_size", steps).noted("batch_size is missing, and taken to be 1")
        }
        Some(_) => not_needed("it is in trainer.train_batch_size: as many micro-batches run as a step needs"),
        None => asked.wrong("a number of micro-batches"),
    }
}

/// Prompt and completion together, which are apart here.
fn block(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(tokens) if tokens >= 2 => set_all([
            ("rollout.prompt_length", json!(tokens / 2)),
            ("rollout.response_length", json!(tokens - tokens / 2)),
        ])
        .noted("half for the prompt, half for the completion: divide it as the task needs"),
        _ => asked.wrong("a number of tokens"),
    }
}
