//! The names of the guide to GRPO's memory: a script's variables.

use super::rules::prelude::*;
use serde_json::json;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: batch block;
};

fn accumulated(source: &SourceKey) -> i64 {
    let steps = ["gradient_accumulation_steps", "grad_accum_steps"];
    steps.iter().find_map(|key| source.facts.whole(key)).unwrap_or(1)
}

/// Prompts at a time, so often: the prompts of a step, and the sequences of a micro-batch.
fn batch(source: &SourceKey) -> MappedKey {
    let (group, steps) = (source.facts.whole("group_size").unwrap_or(1), accumulated(source));
    match source.count() {
        Some(prompts) if group > 0 && steps > 0 => set_all([
            ("trainer.train_batch_size", json!(prompts * steps)),
            ("memory.micro_batch_size", json!(prompts * group)),
        ])
        .with_note(format!("{prompts} prompts x {steps} accumulation steps; {prompts} x {group} sequences at a time")),
        _ => source.wrong("a number of prompts"),
    }
}

/// Prompt and completion together, which are apart here.
fn block(source: &SourceKey) -> MappedKey {
    match source.whole() {
        Some(tokens) if tokens >= 2 => set_all([
            ("rollout.prompt_length", json!(tokens / 2)),
            ("rollout.response_length", json!(tokens - tokens / 2)),
        ])
        .with_note("half for the prompt, half for the completion: divide it as the task needs"),
        _ => source.wrong("a number of tokens"),
    }
}
