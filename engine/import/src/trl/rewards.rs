//! TRL's reward functions by name.

use crate::common::{path, python_reward};
use crate::key_mapping::{MappedKey, SourceKey, cannot, not_needed};
use serde_json::{Value, json};

/// Names in a list of functions, as a file or a program writes it.
fn names(value: &Value) -> Vec<String> {
    let texts: Vec<&str> = match value {
        Value::String(text) => vec![text.as_str()],
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let each = texts.iter().flat_map(|text| text.split(['[', ']', '(', ')', ',', ' ', '"', '\'']));
    each.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// A reward of ours for a function of TRL's, or why there is none.
fn reward(asked: &SourceKey, name: &str) -> Result<Value, String> {
    let last = name.rsplit('.').next().unwrap_or(name);
    match last {
        "accuracy_reward" | "reasoning_accuracy_reward" => Ok(json!({"kind": "trl_accuracy", "name": "accuracy"})),
        "think_format_reward" => Ok(json!({"kind": "trl_think_format", "name": "format"})),
        _ if name.contains('/') => Ok(json!({"kind": "model", "name": last, "path": path(asked.facts, name)})),
        _ => {
            let file = name.rsplit_once('.').map(|(module, _)| format!("{}.py", module.replace('.', "/")));
            match python_reward(file, last) {
                MappedKey::Set(settings, _) => {
                    settings.into_iter().next().map(|(_, reward)| reward).ok_or_else(String::new)
                }
                MappedKey::NotNeeded(why) | MappedKey::Cannot(why) => Err(why),
            }
        }
    }
}

/// The rewards of a trainer or a launch script.
pub(super) fn functions(asked: &SourceKey) -> MappedKey {
    let names = names(asked.value);
    if names.is_empty() {
        return if asked.is_off() {
            not_needed("has no value in the files")
        } else {
            asked.wrong("names of reward functions")
        };
    }
    let weights = asked.facts.value("reward_weights").and_then(Value::as_array);
    let (mut rewards, mut left) = (Vec::new(), Vec::new());
    for (at, name) in names.iter().enumerate() {
        match reward(asked, name) {
            Ok(mut reward) => {
                if let Some(weight) = weights.and_then(|weights| weights.get(at)) {
                    reward["weight"] = weight.clone();
                }
                rewards.push(("task.rewards[]".to_owned(), reward));
            }
            Err(why) => left.push(why),
        }
    }
    let why = left.join("; ");
    if rewards.is_empty() {
        return cannot(why);
    }
    MappedKey::Set(rewards, if why.is_empty() { why } else { format!("but: {why}") })
}
