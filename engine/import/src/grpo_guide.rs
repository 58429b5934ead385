//! The names of the guide to GRPO's memory: a script's own variables.

use super::common::precision;
use super::key_mapping::KeyMapping::{By, NotNeeded, Same};
use super::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, set_noted};
use serde_json::json;

/// All tables.
pub(super) const TABLES: &[&[KeyRule]] = &[&[
    ("batch_size", By(batch)),
    ("group_size", Same("rollout.n")),
    ("gradient_accumulation_steps", By(accumulation)),
    ("grad_accum_steps", By(accumulation)),
    ("block_size", By(block)),
    ("dtype", By(precision)),
    ("n_layer", By(model_size)),
    ("n_embd", By(model_size)),
    ("n_head", By(model_size)),
    ("return_logits", NotNeeded("sampling keeps the log-prob of the token it drew, and no logits")),
]];

fn accumulated(asked: &SourceKey) -> i64 {
    let steps = ["gradient_accumulation_steps", "grad_accum_steps"];
    steps.iter().find_map(|key| asked.facts.whole(key)).unwrap_or(1)
}

/// Prompts at a time, so often: the prompts of a step, and the sequences of a micro-batch.
fn batch(asked: &SourceKey) -> MappedKey {
    let (group, steps) = (asked.facts.whole("group_size").unwrap_or(1), accumulated(asked));
    match asked.whole() {
        Some(prompts) if prompts > 0 && group > 0 && steps > 0 => MappedKey::Set(
            vec![
                ("trainer.train_batch_size".into(), json!(prompts * steps)),
                ("memory.micro_batch_size".into(), json!(prompts * group)),
            ],
            format!("{prompts} prompts x {steps} accumulation steps; {prompts} x {group} sequences at a time"),
        ),
        _ => asked.wrong("a number of prompts"),
    }
}

fn accumulation(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(steps) if steps > 0 && asked.facts.whole("batch_size").is_none() => {
            set_noted("trainer.train_batch_size", steps, "batch_size is missing, and taken to be 1")
        }
        Some(steps) if steps > 0 => super::key_mapping::not_needed(
            "it is in trainer.train_batch_size: as many micro-batches run as a step needs",
        ),
        _ => asked.wrong("a number of micro-batches"),
    }
}

/// Prompt and completion together, which are apart here.
fn block(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(tokens) if tokens >= 2 => MappedKey::Set(
            vec![
                ("rollout.prompt_length".into(), json!(tokens / 2)),
                ("rollout.response_length".into(), json!(tokens - tokens / 2)),
            ],
            "half for the prompt, half for the completion: divide it as the task needs".into(),
        ),
        _ => asked.wrong("a number of tokens"),
    }
}

fn model_size(_: &SourceKey) -> MappedKey {
    cannot(
        "a model's sizes are in its config.json; for a random start write num_hidden_layers, hidden_size and num_attention_heads under model.arch",
    )
}
