//! `NeMo RL`'s `policy` section, with the keys of its memory guide.

use super::grpo::algorithm_key;
use super::optimizer::is_megatron;
use crate::facts::Facts;
use crate::rules::prelude::*;
use serde_json::json;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: frozen_router global_batch lora passed_through total_length;
    Holds: names_default;
};

/// Prompts and answers one after the other, without marks of turns.
const PASSED_THROUGH: &str = "{% for message in messages %}{{ message['content'] }}{% endfor %}";

fn passed_through(_: &SourceKey) -> MappedKey {
    set("model.chat_template", PASSED_THROUGH).with_note("null is this template there")
}

fn names_default(source: &SourceKey) -> bool {
    source.text().is_some_and(|name| name.eq_ignore_ascii_case("default"))
}

/// Completions per optimizer step; Firebrick counts prompts.
fn global_batch(source: &SourceKey) -> MappedKey {
    let count =
        |name: &str, default: i64| algorithm_key(source.facts, name).and_then(crate::facts::whole).unwrap_or(default);
    let (group, prompts) = (count("num_generations_per_prompt", 16), count("num_prompts_per_step", 32));
    match source.count() {
        Some(completions)
            if group > 0
                && completions % group == 0
                && completions / group <= prompts
                && prompts % (completions / group) == 0 =>
        {
            let note = format!("{completions} completions of {group} a prompt");
            set("update.ppo_mini_batch_size", completions / group).with_note(note)
        }
        Some(_) => cannot(format!(
            "an optimizer step takes whole groups of {group}, and a number of prompts that divides {prompts}; a round is one step here"
        )),
        None => source.wrong("a number of completions"),
    }
}

/// Longest prompt. If prompt and completion share one total length, prompts take up to half of it, and completions
/// take the rest, as in `NeMo RL`.
pub(super) fn prompt_length(facts: &Facts) -> Option<i64> {
    let written = facts.whole("data.max_input_seq_length").filter(|n| *n > 0);
    match facts.whole("policy.max_total_sequence_length").filter(|n| *n > 1) {
        Some(total) => Some(written.filter(|length| *length < total).unwrap_or(total / 2)),
        None => written,
    }
}

fn total_length(source: &SourceKey) -> MappedKey {
    let (Some(total), Some(prompt)) = (source.whole().filter(|n| *n > 1), prompt_length(source.facts)) else {
        return source.wrong("a number of tokens");
    };
    let mut settings = vec![("rollout.max_model_len", json!(total))];
    let mut note = String::new();
    if source.facts.whole("data.max_input_seq_length").is_none_or(|length| length >= total) {
        settings.push(("rollout.prompt_length", json!(prompt)));
        note = format!("prompts of more than {prompt} are skipped: raise rollout.prompt_length if there are any");
    }
    if source.facts.whole("policy.generation.max_new_tokens").is_none() {
        settings.push(("rollout.response_length", json!(total)));
    }
    set_all(settings).with_note(note)
}

/// Names of models with experts.
const EXPERTS: [&str; 8] = ["moe", "mixtral", "gpt-oss", "deepseek-v", "moonlight", "glm-4", "minimax", "nano-v3"];

fn frozen_router(source: &SourceKey) -> MappedKey {
    let name = source.facts.text("policy.model_name").unwrap_or_default().to_ascii_lowercase();
    // Qwen3-30B-A3B: 3 billion parameters are active
    let is_active = |part: &str| {
        let number = part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b'));
        number.is_some_and(|number| number.parse::<f64>().is_ok())
    };
    let experts = EXPERTS.iter().any(|expert| name.contains(expert)) || name.split('-').any(is_active);
    match is_megatron(source) && source.is_on() {
        true if experts => cannot("a router is trained with the rest of the model"),
        true => not_needed("a model without experts has no router"),
        false => not_needed("off, as here"),
    }
}

fn lora(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return off();
    }
    let mut settings = vec![
        ("model.lora.rank", source.sibling("dim").cloned().unwrap_or(json!(8))),
        ("model.lora.alpha", source.sibling("alpha").cloned().unwrap_or(json!(32))),
    ];
    settings.extend(source.sibling("dropout").map(|dropout| ("model.lora.dropout", dropout.clone())));
    set_all(settings).with_note(format!("dim, alpha and dropout of {}", source.section()))
}
