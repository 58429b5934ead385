//! verl's `reward_model`, `reward_manager` and `custom_reward_function`.

use crate::common::{path, python_reward};
use crate::facts::Facts;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set};
use serde_json::{Value, json};

pub(super) const TABLE: &[KeyRule] = &[
    ("reward_model.enable", By(judge)),
    ("reward_model.model.path", By(judge_path)),
    ("reward_model.model.input_tokenizer", NotNeeded("a reward model encodes its input with its tokenizer")),
    ("reward_model.reward_manager", By(manager)),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.enable", By(overlong)),
    (
        "reward_model.reward_kwargs.overlong_buffer_cfg.**",
        NotNeeded(
            "overlong_buffer_cfg.enable controls whether there is a penalty; its reward has len and penalty_factor",
        ),
    ),
    ("reward_model.overlong_buffer.enable", By(overlong)),
    (
        "reward_model.overlong_buffer.**",
        NotNeeded("overlong_buffer.enable controls whether there is a penalty; its reward has len and penalty_factor"),
    ),
    ("reward_model.reward_kwargs.max_resp_len", NotNeeded(LIMIT)),
    (
        "reward_model.reward_kwargs.**",
        Off("a rule's options are keys next to its kind in task.rewards (docs/guides/rewards.md)"),
    ),
    ("reward_model.sandbox_fusion.url", Off("no completions are run as programs")),
    (
        "reward_model.sandbox_fusion.**",
        NotNeeded("sandbox_fusion.url controls whether completions are run as programs"),
    ),
    ("sandbox_fusion.url", Off("no completions are run as programs")),
    ("sandbox_fusion.**", NotNeeded("sandbox_fusion.url controls whether completions are run as programs")),
    (
        "reward_model.n_gpus_per_node",
        NotNeeded("a reward model computes on the run's device, or on the `device` of its reward"),
    ),
    ("reward_model.nnodes", NotNeeded("a reward model computes on the run's device, or on the `device` of its reward")),
    ("reward_model.**", NotNeeded(JUDGE)),
    ("reward_manager.source", NotNeeded("rules add up their parts")),
    ("reward_manager.name", By(manager)),
    ("reward_manager.**", NotNeeded("rules add up their parts")),
    ("custom_reward_function.path", By(custom)),
    ("custom_reward_function.name", NotNeeded("it names the function at custom_reward_function.path")),
    (
        "custom_reward_function.reward_kwargs.**",
        NotNeeded("they are the kwargs of the reward of custom_reward_function.path"),
    ),
    // verl of 2026 has all of it in one section
    ("reward.num_workers", NotNeeded(WORKERS)),
    ("reward.custom_reward_function.path", By(custom)),
    ("reward.custom_reward_function.name", NotNeeded("it names the function at reward.custom_reward_function.path")),
    (
        "reward.custom_reward_function.reward_kwargs.**",
        NotNeeded("they are the kwargs of the reward of reward.custom_reward_function.path"),
    ),
    ("reward.reward_manager.source", NotNeeded("rules add up their parts")),
    ("reward.reward_manager.name", By(manager)),
    ("reward.reward_manager.**", NotNeeded("rules add up their parts")),
    ("reward.reward_kwargs.overlong_buffer_cfg.enable", By(overlong)),
    (
        "reward.reward_kwargs.overlong_buffer_cfg.**",
        NotNeeded(
            "overlong_buffer_cfg.enable controls whether there is a penalty; its reward has len and penalty_factor",
        ),
    ),
    ("reward.reward_kwargs.max_resp_len", NotNeeded(LIMIT)),
    (
        "reward.reward_kwargs.**",
        Off("a rule's options are keys next to its kind in task.rewards (docs/guides/rewards.md)"),
    ),
    ("reward.reward_model.enable", By(judge)),
    ("reward.reward_model.model_path", By(judge_path)),
    ("reward.reward_model.**", NotNeeded(JUDGE)),
    ("reward.sandbox_fusion.url", Off("no completions are run as programs")),
    ("reward.sandbox_fusion.**", NotNeeded("sandbox_fusion.url controls whether completions are run as programs")),
];

const LIMIT: &str = "it is the `limit` of the length reward, unless it is rollout.response_length";
const WORKERS: &str = "`workers` of a Python reward sets the number of processes that call it";

fn judge(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("no reward model, as here by default");
    }
    let section = asked.key.trim_end_matches(".enable");
    let paths = ["model.path", "model_path"].map(|path| format!("{section}.{path}"));
    let Some(folder) = paths.iter().find_map(|path| asked.facts.text(path)) else {
        return cannot("the reward model's path is missing: write rewards: [{kind: model, path: FOLDER}]");
    };
    set("task.rewards[]", json!({"kind": "model", "path": path(asked.facts, folder)}))
}

fn judge_path(asked: &SourceKey) -> MappedKey {
    let sections = ["reward_model.enable", "reward.reward_model.enable"];
    not_needed(if sections.iter().any(|key| asked.facts.is_on(key)) {
        "it is in the reward of reward_model.enable"
    } else {
        "reward_model.enable is off"
    })
}

fn manager(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("naive" | "dapo" | "prime") | None => {
            not_needed("task.rewards grade every completion, while others are still sampled")
        }
        Some("batch") => not_needed(
            "a Python reward with the parameters of verl's batch manager (data_sources, solution_strs, …) is called with \
             all completions of a prompt",
        ),
        Some(name) => cannot(format!("no reward manager {name}: specify in task.rewards how completions are graded")),
    }
}

/// DAPO's soft overlong penalty.
fn overlong(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off: no penalty for length");
    }
    let section = asked.key.trim_end_matches(".enable");
    let (Some(buffer), factor) = (
        asked.facts.whole(&format!("{section}.len")),
        asked.facts.number(&format!("{section}.penalty_factor")).unwrap_or(1.0),
    ) else {
        return cannot("its len is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let mut reward = json!({"kind": "length", "buffer": buffer, "weight": factor});
    let limit = asked.facts.whole(&format!("{}.max_resp_len", section.trim_end_matches(".overlong_buffer_cfg")));
    if let Some(limit) = limit.filter(|limit| asked.facts.whole("data.max_response_length") != Some(*limit)) {
        reward["limit"] = limit.into();
    }
    set("task.rewards[]", reward)
}

/// The function of the files that grades completions.
pub(super) fn custom_function(facts: &Facts) -> Option<&str> {
    let section = SECTIONS.into_iter().find(|section| facts.text(&format!("{section}.path")).is_some())?;
    Some(facts.text(&format!("{section}.name")).unwrap_or("compute_score"))
}

const SECTIONS: [&str; 2] = ["custom_reward_function", "reward.custom_reward_function"];

fn custom(asked: &SourceKey) -> MappedKey {
    let Some(file) = asked.text() else {
        return not_needed("none, as here by default");
    };
    let section = asked.key.trim_end_matches(".path");
    let name = asked.facts.text(&format!("{section}.name"));
    let mut reward = python_reward(Some(path(asked.facts, file)), name.unwrap_or("compute_score"));
    let start = format!("{section}.reward_kwargs.");
    if let MappedKey::Set(settings, _) = &mut reward {
        for key in asked.facts.keys() {
            let (Some(argument), Some(value)) = (key.strip_prefix(&start), asked.facts.value(key)) else {
                continue;
            };
            for (_, reward) in &mut *settings {
                put(&mut reward["kwargs"], argument, plain(value));
            }
        }
    }
    reward
}

/// Puts an argument with a dotted name into nested objects.
fn put(arguments: &mut Value, name: &str, value: Value) {
    match name.split_once('.') {
        Some((outer, inner)) => put(&mut arguments[outer], inner, value),
        None => arguments[name] = value,
    }
}

const JUDGE: &str = "a reward model scores in batches by tokens (score_tokens of the reward)";
