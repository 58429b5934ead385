//! TRL's and open-r1's reward functions, by name or as a Python expression.

use crate::facts::Facts;
use crate::literal::{hydra, settings};
use crate::rules::prelude::*;
use serde_json::{Map, Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: functions;
};

/// File of open-r1's functions.
const OPEN_R1_REWARDS: &str = "src/open_r1/rewards.py";
/// The `format_reward` of open-r1.
const OPEN_R1_FORMAT: &str = r"\A<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>(?m:$)";

/// An element of a list: a name and its arguments.
#[derive(Debug, PartialEq)]
struct FunctionCall<'t> {
    name: &'t str,
    /// Arguments of the call that makes the function.
    arguments: Option<Map<String, Value>>,
    /// Arguments of the function.
    kwargs: Map<String, Value>,
}

/// Splits a text at commas outside of brackets, quotes and a lambda's parameters.
fn pieces(text: &str) -> Vec<&str> {
    let (mut depth, mut quote, mut start, mut pieces) = (0_usize, None, 0, Vec::new());
    for (at, c) in text.char_indices() {
        if quote.is_some() {
            quote = quote.filter(|open| *open != c);
            continue;
        }
        match c {
            '"' | '\'' => quote = Some(c),
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                let piece = &text[start..at];
                if !piece.trim_start().starts_with("lambda") || piece.contains(':') {
                    pieces.push(piece);
                    start = at + 1;
                }
            }
            _ => {}
        }
    }
    pieces.push(&text[start..]);
    pieces.into_iter().map(str::trim).filter(|piece| !piece.is_empty()).collect()
}

/// Name and arguments of a call, if the text is one.
fn call(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once('(')?;
    Some((name.trim(), rest.strip_suffix(')')?))
}

fn keywords<'t>(parts: impl IntoIterator<Item = &'t str>) -> Result<Map<String, Value>, String> {
    let pairs = parts.into_iter().map(|part| {
        let (name, value) = part.split_once('=').ok_or_else(|| format!("`{part}` is not passed by name"))?;
        let value = match hydra(value) {
            Value::String(text) if text == value.trim() => {
                return Err(format!("its argument `{part}` is known only to the running program"));
            }
            value => value,
        };
        Ok((name.trim().to_owned(), value))
    });
    pairs.collect()
}

impl<'t> FunctionCall<'t> {
    fn parse(text: &'t str) -> Result<Self, String> {
        let plain = Self { name: text.trim_matches(['"', '\'']), arguments: None, kwargs: Map::new() };
        match call(text) {
            None => Ok(plain),
            Some(("partial" | "functools.partial", inner)) => {
                let parts = pieces(inner);
                let (name, more) = parts.split_first().ok_or("`partial` has no function")?;
                Ok(Self { name, kwargs: keywords(more.iter().copied())?, ..plain })
            }
            Some((name, inner)) => Ok(Self { name, arguments: Some(keywords(pieces(inner))?), ..plain }),
        }
    }

    fn python(&self, facts: &Facts, file: &str) -> Value {
        let last = self.name.rsplit('.').next().unwrap_or(self.name);
        let mut reward = json!({"kind": "python", "file": facts.path(file), "function": last, "name": last});
        if let Some(arguments) = &self.arguments {
            reward["arguments"] = arguments.clone().into();
        }
        if !self.kwargs.is_empty() {
            reward["kwargs"] = self.kwargs.clone().into();
        }
        reward
    }
}

/// Elements of a list of functions from a file or a program.
fn elements(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => {
            let text = text.trim();
            let inner = |open, close| text.strip_prefix(open).and_then(|text: &str| text.strip_suffix(close));
            pieces(inner('[', ']').or_else(|| inner('(', ')')).unwrap_or(text))
        }
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Firebrick's reward for a function with a note, or the reason why there is none.
fn reward(source: &SourceKey, text: &str) -> Result<(Value, String), String> {
    let facts = source.facts;
    let is_word = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "_./-\"'".contains(c));
    if text.starts_with("lambda") {
        let place = facts.place(source.key).map(|place| format!(" ({place})")).unwrap_or_default();
        return Err(format!(
            "a lambda{place} has no name that a configuration could have: write `{text}` as a function with `def`"
        ));
    }
    if call(text).is_none() && !is_word(text) {
        return Err(format!("`{text}` is known only to the running program: write each reward under task.rewards"));
    }
    let call = FunctionCall::parse(text).map_err(|why| format!("`{text}`: {why}; write it under task.rewards"))?;
    if let Some(place) = facts.definition(call.name) {
        let note = "code that starts the training must be under `if __name__ == \"__main__\":`";
        return Ok((call.python(facts, &place.file), note.to_owned()));
    }
    let plain = |reward: Value| Ok((reward, String::new()));
    let last = call.name.rsplit('.').next().unwrap_or(call.name);
    match last {
        "accuracy_reward" | "reasoning_accuracy_reward" => plain(json!({"kind": "trl_accuracy", "name": "accuracy"})),
        "think_format_reward" => plain(json!({"kind": "trl_think_format", "name": "format"})),
        "get_soft_overlong_punishment" => {
            // defaults of TRL's script
            let argument = |key: &str, default: u64| {
                let value = call.arguments.as_ref().and_then(|arguments| arguments.get(key));
                value.and_then(Value::as_u64).unwrap_or(default)
            };
            let (limit, buffer) = (argument("max_completion_len", 1280), argument("soft_punish_cache", 256));
            plain(json!({"kind": "length", "name": "soft_overlong", "buffer": buffer, "limit": limit, "clip": [-1, 0]}))
        }
        _ if call.name.contains('/') => plain(json!({"kind": "model", "name": last, "path": facts.path(call.name)})),
        _ => match call.name.rsplit_once('.') {
            Some((module, _)) => plain(call.python(facts, &format!("{}.py", module.replace('.', "/")))),
            None => open_r1(facts, call.name).unwrap_or_else(|| {
                Err(format!(
                    "no file defines `{name}`: import the file that does together with this one, or write rewards: \
                     [{{kind: python, file: FILE, function: {name}}}]",
                    name = call.name
                ))
            }),
        },
    }
}

/// open-r1's functions by their short names. Functions that make a reward have arguments, each with its key and
/// default.
const OPEN_R1: [(&str, &str, &str); 7] = [
    ("tag_count", "tag_count_reward", ""),
    ("reasoning_steps", "reasoning_steps_reward", ""),
    ("length", "len_reward", ""),
    ("code_format", "get_code_format_reward", "language:code_language=python"),
    (
        "cosine",
        "get_cosine_scaled_reward",
        "min_value_wrong:cosine_min_value_wrong=0.0 max_value_wrong:cosine_max_value_wrong=-0.5 \
         min_value_correct:cosine_min_value_correct=0.5 max_value_correct:cosine_max_value_correct=1.0 \
         max_len:cosine_max_len=1000",
    ),
    (
        "repetition_penalty",
        "get_repetition_penalty_reward",
        "ngram_size:repetition_n_grams=3 max_penalty:repetition_max_penalty=-1.0",
    ),
    (
        "soft_overlong_punishment",
        "get_soft_overlong_punishment",
        "max_completion_len:max_completion_len=16384 soft_punish_cache:soft_punish_cache=4096",
    ),
];

/// Reward of a short name of open-r1.
fn open_r1(facts: &Facts, name: &str) -> Option<Result<(Value, String), String>> {
    if name == "accuracy" {
        let note = "open-r1's accuracy_reward: as TRL's";
        return Some(Ok((json!({"kind": "trl_accuracy", "name": name}), note.into())));
    }
    if name == "format" {
        let note = "open-r1's format_reward";
        return Some(Ok((json!({"kind": "regex", "name": name, "pattern": OPEN_R1_FORMAT}), note.into())));
    }
    if ["code", "binary_code", "ioi_code", "cf_code"].contains(&name) {
        return Some(Err(format!(
            "open-r1's `{name}` runs programs in a sandbox that its script sets up: write a function that calls it, \
             and name that under task.rewards ({{kind: python, file, function}})"
        )));
    }
    let (_, function, arguments) = OPEN_R1.iter().find(|(short, _, _)| *short == name)?;
    let mut reward = json!({"kind": "python", "file": facts.path(OPEN_R1_REWARDS), "function": function, "name": name});
    for (argument, default) in settings("", arguments) {
        let (argument, key) = argument.split_once(':')?;
        reward["arguments"][argument] = facts.value(key).cloned().unwrap_or(default);
    }
    Some(Ok((reward, format!("`{name}` is of open-r1: its file is taken from a checkout in this folder"))))
}

/// Rewards of a list of functions, with notes, and reasons for missing ones.
#[derive(Default)]
struct RewardList {
    rewards: Vec<Value>,
    notes: Vec<String>,
    missing: Vec<String>,
}

impl RewardList {
    fn new(source: &SourceKey) -> Self {
        let weights = source.facts.value("reward_weights").and_then(Value::as_array);
        // TRL's script has the reward model before the functions
        let is_behind = source.key == "reward_funcs" && source.facts.value("reward_model_name_or_path").is_some();
        let mut rewards = Self::default();
        for (at, element) in (usize::from(is_behind)..).zip(elements(source.value)) {
            match reward(source, element) {
                Ok((mut reward, note)) => {
                    if let Some(weight) = weights.and_then(|weights| weights.get(at)) {
                        reward["weight"] = weight.clone();
                    }
                    rewards.rewards.push(reward);
                    if !note.is_empty() && !rewards.notes.contains(&note) {
                        rewards.notes.push(note);
                    }
                }
                Err(why) => rewards.missing.push(why),
            }
        }
        rewards
    }
}

/// The keys that list functions.
const LISTS: [&str; 4] =
    ["reward_model_name_or_path", "reward_funcs", "GRPOTrainer.reward_funcs", "RLOOTrainer.reward_funcs"];

/// The rewards of a trainer or a launch script.
pub(super) fn functions(source: &SourceKey) -> MappedKey {
    if source.is_off() {
        return absent();
    }
    let list = RewardList::new(source);
    if !list.missing.is_empty() {
        return cannot(list.missing.join("; "));
    }
    if list.rewards.is_empty() {
        return source.wrong("names of reward functions");
    }
    let settings = list.rewards.into_iter().map(|reward| ("task.rewards[]".to_owned(), reward));
    set_all(settings).with_note(list.notes.join("; "))
}

/// Known rewards of the lists that have unknown ones.
pub(super) fn partial_rewards(facts: &Facts) -> Vec<Value> {
    let sources = LISTS.into_iter().filter_map(|key| Some(SourceKey { key, value: facts.value(key)?, facts }));
    let lists = sources.map(|source| RewardList::new(&source)).filter(|list| !list.missing.is_empty());
    lists.flat_map(|list| list.rewards).collect()
}
