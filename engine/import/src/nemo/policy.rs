//! `NeMo RL`'s `policy` section, with the keys of its memory guide.

use super::grpo::of_run;
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
    set("model.chat_template", PASSED_THROUGH).noted("null is this template there")
}

fn names_default(source: &SourceKey) -> bool {
    source.text().is_some_and(|name| name.eq_ignore_ascii_case("default"))
}

/// Completions an optimizer step, which are prompts here.
fn global_batch(source: &SourceKey) -> MappedKey {
    let count = |name: &str, default: i64| of_run(source.facts, name).and_then(crate::facts::whole).unwrap_or(default);
    let (group, prompts) = (count("num_generations_per_prompt", 16), count("num_prompts_per_step", 32));
    match source.count() {
        Some(all) if group > 0 && all % group == 0 && all / group <= prompts && prompts % (all / group) == 0 => {
            let note = format!("{all} completions of {group} a prompt");
            set("update.ppo_mini_batch_size", all / group).noted(note)
        }
        Some(_) => cannot(format!(
            "an optimizer step takes whole groups of {group}, and a number of prompts that divides {prompts}; a round is one step here"
        )),
        None => source.wrong("a number of completions"),
    }
}

/// Where prompt and completion share a length that leaves nothing of it to either, prompts take up to half. Completions
/// take what the prompt leaves, as there.
pub(super) fn prompt_length(facts: &Facts) -> Option<i64> {
    let written = facts.whole("data.max_input_seq_length").filter(|n| *n > 0);
    match facts.whole("policy.max_total_sequence_length").filter(|n| *n > 1) {
        Some(total) => Some(written.filter(|own| *own < total).unwrap_or(total / 2)),
        None => written,
    }
}

fn total_length(source: &SourceKey) -> MappedKey {
    let (Some(total), Some(prompt)) = (source.whole().filter(|n| *n > 1), prompt_length(source.facts)) else {
        return source.wrong("a number of tokens");
    };
    let mut all = vec![("rollout.max_model_len", json!(total))];
    let mut note = String::new();
    if source.facts.whole("data.max_input_seq_length").is_none_or(|own| own >= total) {
        all.push(("rollout.prompt_length", json!(prompt)));
        note = format!("prompts of more than {prompt} are skipped: raise rollout.prompt_length if there are any");
    }
    if source.facts.whole("policy.generation.max_new_tokens").is_none() {
        all.push(("rollout.response_length", json!(total)));
    }
    set_all(all).noted(note)
}

/// Names of models with experts.
const EXPERTS: [&str; 8] = ["moe", "mixtral", "gpt-oss", "deepseek-v", "moonlight", "glm-4", "minimax", "nano-v3"];

fn frozen_router(source: &SourceKey) -> MappedKey {
    let name = source.facts.text("policy.model_name").unwrap_or_default().to_ascii_lowercase();
    // Qwen3-30B-A3B: so many billions are active
    let is_active = |part: &str| {
        let number = part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b'));
        number.is_some_and(|number| number.parse::<f64>().is_ok())
    };
    let experts = EXPERTS.iter().any(|own| name.contains(own)) || name.split('-').any(is_active);
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
    let mut all = vec![
        ("model.lora.rank", source.beside("dim").cloned().unwrap_or(json!(8))),
        ("model.lora.alpha", source.beside("alpha").cloned().unwrap_or(json!(32))),
    ];
    all.extend(source.beside("dropout").map(|share| ("model.lora.dropout", share.clone())));
    set_all(all).noted(format!("dim, alpha and dropout of {}", source.section()))
}
