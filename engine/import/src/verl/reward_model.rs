//! verl's `reward_model` and `custom_reward_function`, and the reward of its rows.

use crate::common::reward_model;
use crate::facts::Facts;
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: custom judge overlong;
    To: reward_name;
};

fn judge(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return not_needed("no reward model, as here by default");
    }
    let folder = ["model.path", "model_path"].into_iter().find_map(|path| source.sibling(path)?.as_str());
    match folder {
        Some(folder) => reward_model(source.facts, folder),
        None => cannot("the reward model's path is missing: write rewards: [{kind: model, path: FOLDER}]"),
    }
}

/// DAPO's soft overlong penalty.
fn overlong(source: &SourceKey) -> MappedKey {
    if !source.is_on() {
        return not_needed("off: no penalty for length");
    }
    let Some(buffer) = source.sibling("len").and_then(crate::facts::whole) else {
        return cannot("its len is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let factor = source.sibling("penalty_factor").and_then(crate::facts::number).unwrap_or(1.0);
    let mut reward = json!({"kind": "length", "buffer": buffer, "weight": factor});
    let section = source.section().trim_end_matches(".overlong_buffer_cfg");
    let limit = source.facts.whole(&format!("{section}.max_resp_len"));
    if let Some(limit) = limit.filter(|limit| source.facts.whole("data.max_response_length") != Some(*limit)) {
        reward["limit"] = limit.into();
    }
    set("task.rewards[]", reward)
}

/// The files' reward function.
fn custom_function(facts: &Facts) -> Option<&str> {
    let sections = ["custom_reward_function", "reward.custom_reward_function"];
    let section = sections.into_iter().find(|section| facts.text(&format!("{section}.path")).is_some())?;
    Some(facts.text(&format!("{section}.name")).unwrap_or("compute_score"))
}

fn custom(source: &SourceKey) -> MappedKey {
    let Some(file) = source.text() else {
        return not_needed("none, as here by default");
    };
    let name = source.sibling("name").and_then(Value::as_str).unwrap_or("compute_score");
    let mut reward = json!({"kind": "python", "file": source.facts.path(file), "function": name, "name": name});
    let start = format!("{}.reward_kwargs.", source.section());
    for key in source.facts.keys() {
        if let (Some(argument), Some(value)) = (key.strip_prefix(&start), source.facts.value(key)) {
            put(&mut reward["kwargs"], argument, plain(value));
        }
    }
    set("task.rewards[]", reward)
}

/// Puts an argument with a dotted name into nested objects.
fn put(arguments: &mut Value, name: &str, value: Value) {
    match name.split_once('.') {
        Some((outer, inner)) => put(&mut arguments[outer], inner, value),
        None => arguments[name] = value,
    }
}

/// The name of the reward that compares with the ground truth.
fn reward_name(source: &SourceKey, key: &str) -> MappedKey {
    let guessed = || guess(source.facts).0["kind"].as_str().unwrap_or_default().to_owned();
    let name = custom_function(source.facts).map_or_else(guessed, str::to_owned);
    set(key, name).with_note("the comparison with the ground truth")
}

/// The reward of verl's rows, guessed from the file names, and true if it is certain.
pub(super) fn guess(facts: &Facts) -> (Value, bool) {
    let files = facts.value("data.train_files").map(Value::to_string).unwrap_or_default().to_ascii_lowercase();
    if files.contains("gsm8k") {
        return (json!({"kind": "gsm8k", "method": "strict"}), !files.contains(','));
    }
    let is_math = ["math", "aime", "dapo"].iter().any(|word| files.contains(word));
    (json!({"kind": if is_math { "verl_math" } else { "exact" }}), false)
}
