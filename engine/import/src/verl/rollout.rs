//! verl's sampling: sizes, precisions, turns, and the adapters of its model.

use crate::common::given;
use crate::rules::prelude::*;
use firebrick_engine::task::ToolParser;
use serde_json::Value;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: captures group other_format share targets;
    To: turns;
};

fn group(source: &SourceKey) -> MappedKey {
    let count = |key| source.facts.whole(key).unwrap_or(1);
    match count("actor_rollout_ref.rollout.n") * count("actor_rollout_ref.rollout.n_agent") {
        n if n > 0 => set("rollout.n", n),
        _ => source.wrong("a number of completions"),
    }
}

/// vLLM's share of the device. In verl it is the engine's memory besides the training state; in Firebrick all memory in
/// use while sampling. The two agree if training keeps nothing on the device meanwhile.
fn share(source: &SourceKey) -> MappedKey {
    let is_on = |place: &str, what: &str| source.facts.is_on(&format!("actor_rollout_ref.actor.{place}.{what}"));
    let is_offloaded = |what: &str| is_on("fsdp_config", what) || is_on("megatron", what);
    let Some(share) = source.number() else {
        return source.wrong("a share from 0 to 1");
    };
    // while sampling, the share would also have to hold the base model's copy with merged adapters
    let adapters = source.facts.number("actor_rollout_ref.model.lora_rank").is_some_and(|rank| rank > 0.0);
    let streams = ["offload_policy", "cpu_offload", "offload_params"].iter().any(|what| is_on("fsdp_config", what));
    if !adapters && (streams || (is_offloaded("param_offload") && is_offloaded("optimizer_offload"))) {
        return set("rollout.gpu_memory_utilization", share)
            .with_note("of the device's total memory; remove it on a CPU, which has no memory of this kind");
    }
    not_needed(
        "sampling uses the memory that training leaves free: the two alternate in one pool. \
         rollout.gpu_memory_utilization would bound all memory in use while sampling; in verl it does not count the \
         training state",
    )
}

fn captures(source: &SourceKey) -> MappedKey {
    if source.facts.is_on("actor_rollout_ref.rollout.enforce_eager") {
        return not_needed("enforce_eager: nothing is captured");
    }
    let Value::Array(sizes) = source.value else {
        return source.off_or_wrong("a list of integers");
    };
    let most = source.facts.whole("actor_rollout_ref.rollout.max_num_seqs").unwrap_or(256);
    let within: Vec<Value> =
        sizes.iter().filter(|size| size.as_i64().is_some_and(|n| n > 0 && n <= most)).cloned().collect();
    if within.is_empty() {
        return not_needed(format!("none of the sizes is from 1 to rollout.max_num_seqs ({most})"));
    }
    let left = sizes.len() - within.len();
    let note = if left == 0 { String::new() } else { format!("{left} above rollout.max_num_seqs omitted") };
    set("rollout.cudagraph_capture_sizes", within).with_note(note)
}

/// Limit of the model's turns: the key's value plus `more`. The lowest limit applies.
fn turns(source: &SourceKey, more: &str) -> MappedKey {
    let more = i64::from(more == "1");
    let Some(turns) = source.count() else {
        return not_needed("none, as here by default");
    };
    let limit = |name: &str, more: i64| {
        let value = source.facts.whole(&format!("actor_rollout_ref.rollout.multi_turn.{name}"));
        value.filter(|n| *n > 0).map(|n| n + more)
    };
    let other =
        if more == 0 { limit("max_user_turns", 1) } else { limit("max_assistant_turns", 0).or(limit("max_turns", 0)) };
    match other {
        Some(other) if other < turns + more => not_needed(format!("the other limit comes first: {other} turns")),
        _ => set("rollout.multi_turn.max_assistant_turns", turns + more),
    }
}

/// An unsupported format of tool calls.
fn other_format(source: &SourceKey) -> MappedKey {
    cannot(format!(
        "tool calls are read as {}, not as {}; a chat template can ask for one of these",
        ToolParser::names(),
        source.text().unwrap_or_default()
    ))
}

/// Modules with adapters; Megatron's names cover several modules here.
fn targets(source: &SourceKey) -> MappedKey {
    let names = match source.value {
        Value::Array(names) if names.iter().all(Value::is_string) => names,
        _ => return given(source, "model.lora.target_modules"),
    };
    let mut modules = Vec::new();
    for name in names.iter().filter_map(Value::as_str) {
        match name {
            "linear_qkv" => modules.extend(["q_proj", "k_proj", "v_proj"]),
            "linear_proj" => modules.push("o_proj"),
            "linear_fc1" => modules.extend(["gate_proj", "up_proj"]),
            "linear_fc2" => modules.push("down_proj"),
            other => modules.push(other),
        }
    }
    set("model.lora.target_modules", modules)
}
