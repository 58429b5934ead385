//! verl's `reward_model`, `reward_manager` and `custom_reward_function`, and what grades the completions of its rows.

use crate::common::{path, reward_model};
use crate::facts::Facts;
use crate::key_mapping::prelude::*;
use serde_json::{Value, json};

const JUDGE: &str = "a reward model scores in batches by tokens (score_tokens of the reward)";
const LIMIT: &str = "it is the `limit` of the length reward, unless it is rollout.response_length";
const ON_A_DEVICE: &str = "a reward model computes on the run's device, or on the `device` of its reward";
const OPTIONS: &str = "a rule's options are keys next to its kind in task.rewards (docs/guides/rewards.md)";
const OVERLONG: &str = "`enable` controls whether there is a penalty; its reward has len and penalty_factor";
const PARTS: &str = "rules add up their parts";
const NO_SANDBOX: &str = "no completions are run as programs";
const SANDBOX: &str = "sandbox_fusion.url controls whether completions are run as programs";
const NAMED: &str = "it names the function at custom_reward_function.path";
const KWARGS: &str = "they are the kwargs of the reward of custom_reward_function.path";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("reward_model.enable reward.reward_model.enable", By(judge)),
        ("reward_model.model.path reward.reward_model.model_path", By(judge_path)),
        ("reward_model.model.input_tokenizer", NotNeeded("a reward model encodes its input with its tokenizer")),
        ("reward_model.reward_manager reward_manager.name reward.reward_manager.name", By(manager)),
        ("reward_manager.** reward.reward_manager.**", NotNeeded(PARTS)),
        (
            "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.enable reward_model.overlong_buffer.enable",
            By(overlong),
        ),
        (
            "{reward_model,reward}.reward_kwargs.overlong_buffer_cfg.** reward_model.overlong_buffer.**",
            NotNeeded(OVERLONG),
        ),
        ("reward_model.reward_kwargs.max_resp_len reward.reward_kwargs.max_resp_len", NotNeeded(LIMIT)),
        ("reward_model.reward_kwargs.** reward.reward_kwargs.**", Off(OPTIONS)),
        ("reward_model.sandbox_fusion.url sandbox_fusion.url reward.sandbox_fusion.url", Off(NO_SANDBOX)),
        ("reward_model.sandbox_fusion.** sandbox_fusion.** reward.sandbox_fusion.**", NotNeeded(SANDBOX)),
        ("reward_model.n_gpus_per_node reward_model.nnodes", NotNeeded(ON_A_DEVICE)),
        ("reward_model.** reward.reward_model.**", NotNeeded(JUDGE)),
        ("custom_reward_function.path reward.custom_reward_function.path", By(custom)),
        ("custom_reward_function.name reward.custom_reward_function.name", NotNeeded(NAMED)),
        ("{,reward.}custom_reward_function.reward_kwargs.**", NotNeeded(KWARGS)),
        ("reward.num_workers", NotNeeded("`workers` of a Python reward sets the number of processes that call it")),
    ],
);

fn judge(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("no reward model, as here by default");
    }
    let folder = ["model.path", "model_path"].into_iter().find_map(|path| asked.beside(path)?.as_str());
    match folder {
        Some(folder) => reward_model(asked.facts, folder),
        None => cannot("the reward model's path is missing: write rewards: [{kind: model, path: FOLDER}]"),
    }
}

fn judge_path(asked: &SourceKey) -> MappedKey {
    let sections = ["reward_model.enable", "reward.reward_model.enable"];
    let on = sections.iter().any(|key| asked.facts.is_on(key));
    not_needed(if on { "it is in the reward of reward_model.enable" } else { "reward_model.enable is off" })
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
    let Some(buffer) = asked.beside("len").and_then(crate::facts::whole) else {
        return cannot("its len is missing: write rewards: [{kind: length, buffer: TOKENS}]");
    };
    let factor = asked.beside("penalty_factor").and_then(crate::facts::number).unwrap_or(1.0);
    let mut reward = json!({"kind": "length", "buffer": buffer, "weight": factor});
    let section = asked.section().trim_end_matches(".overlong_buffer_cfg");
    let limit = asked.facts.whole(&format!("{section}.max_resp_len"));
    if let Some(limit) = limit.filter(|limit| asked.facts.whole("data.max_response_length") != Some(*limit)) {
        reward["limit"] = limit.into();
    }
    set("task.rewards[]", reward)
}

/// The function of the files that grades completions.
fn custom_function(facts: &Facts) -> Option<&str> {
    let sections = ["custom_reward_function", "reward.custom_reward_function"];
    let section = sections.into_iter().find(|section| facts.text(&format!("{section}.path")).is_some())?;
    Some(facts.text(&format!("{section}.name")).unwrap_or("compute_score"))
}

fn custom(asked: &SourceKey) -> MappedKey {
    let Some(file) = asked.text() else {
        return not_needed("none, as here by default");
    };
    let name = asked.beside("name").and_then(Value::as_str).unwrap_or("compute_score");
    let mut reward = json!({"kind": "python", "file": path(asked.facts, file), "function": name, "name": name});
    let start = format!("{}.reward_kwargs.", asked.section());
    for key in asked.facts.keys() {
        if let (Some(argument), Some(value)) = (key.strip_prefix(&start), asked.facts.value(key)) {
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
pub(super) fn grader(facts: &Facts) -> String {
    let guessed = || guess(facts).0["kind"].as_str().unwrap_or_default().to_owned();
    custom_function(facts).map_or_else(guessed, str::to_owned)
}

/// What verl grades the rows of a file by, as its name tells it, and whether it does.
pub(super) fn guess(facts: &Facts) -> (Value, bool) {
    let files = facts.value("data.train_files").map(Value::to_string).unwrap_or_default().to_ascii_lowercase();
    if files.contains("gsm8k") {
        return (json!({"kind": "gsm8k", "method": "strict"}), !files.contains(','));
    }
    let is_math = ["math", "aime", "dapo"].iter().any(|word| files.contains(word));
    (json!({"kind": if is_math { "verl_math" } else { "exact" }}), false)
}
