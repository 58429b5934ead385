//! The configuration while it is put together.

use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Sections in the order in which the configuration has them.
const SECTIONS: &str = "model task objective rollout update optim critic trainer memory precision device output warmup";

/// Key of the list of rewards.
const REWARDS: &str = "task.rewards";

/// A value that the files lack.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Missing {
    /// Firebrick's key.
    pub key: String,
    /// Placeholder in the configuration.
    pub stands_in: Value,
    /// Description of the value to write.
    pub what: String,
}

/// Returns true if a message names a key, and not only a longer one that contains it.
pub(super) fn names(message: &str, key: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let ends = |rest: &str| {
        let mut next = rest.chars();
        // a stop ends a sentence, or leads to another key
        !next.next().is_some_and(|c| is_part(c) || c == '.' && next.next().is_some_and(is_part))
    };
    message.match_indices(key).any(|(at, _)| {
        let begins = !message[..at].chars().next_back().is_some_and(|c| is_part(c) || c == '.');
        begins && ends(&message[at + key.len()..])
    })
}

/// Firebrick settings by dotted path.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    settings: BTreeMap<String, Value>,
    /// Rewards, in their order.
    pub rewards: Vec<Value>,
    /// Values that the files lack.
    pub missing: Vec<Missing>,
    /// Changed settings, with the reasons.
    pub adjusted: Vec<String>,
    /// True if the environment makes the prompts and there are no rows.
    pub has_no_rows: bool,
}

impl Assembly {
    /// Sets a key; `task.rewards[]` adds a reward.
    pub fn put(&mut self, key: &str, value: Value) {
        if key == "task.rewards[]" {
            self.rewards.push(value);
        } else {
            self.settings.insert(key.to_owned(), value);
        }
    }

    pub fn settings(&self) -> &BTreeMap<String, Value> {
        &self.settings
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.settings.get(key)
    }

    pub fn count(&self, key: &str) -> Option<u64> {
        self.get(key).and_then(Value::as_u64)
    }

    pub fn has(&self, key: &str) -> bool {
        self.settings.contains_key(key)
    }

    pub fn remove(&mut self, key: &str) -> Option<Value> {
        self.settings.remove(key)
    }

    /// Keys of a section.
    pub fn keys_of(&self, section: &str) -> Vec<String> {
        let start = format!("{section}.");
        let keys = self.settings.keys().filter(|key| key.starts_with(&start));
        keys.cloned().collect()
    }

    /// An optional setting that a message names.
    pub fn named_in(&self, message: &str) -> Option<String> {
        let needed = |key: &str| ["model", "task", "output"].contains(&key.split('.').next().unwrap_or(key));
        let named = |key: &&String| names(message, key) && !needed(key);
        self.settings.keys().find(named).cloned()
    }

    /// Sets a placeholder, unless the key has a value.
    pub fn need(&mut self, key: &str, stands_in: impl Into<Value>, what: &str) {
        if self.has(key) {
            return;
        }
        let stands_in = stands_in.into();
        self.put(key, stands_in.clone());
        self.missing.push(Missing { key: key.to_owned(), stands_in, what: what.to_owned() });
    }

    /// Marks the first reward as a placeholder.
    pub fn replace_rewards(&mut self, what: &str) {
        let stands_in = self.rewards.first().cloned().unwrap_or_default();
        self.missing.push(Missing { key: REWARDS.to_owned(), stands_in, what: what.to_owned() });
    }

    /// The configuration as nested sections.
    pub fn nested(&self) -> Map<String, Value> {
        let mut root = Map::new();
        let rank = |key: &String| {
            let first = key.split('.').next().unwrap_or(key);
            SECTIONS.split_whitespace().position(|section| section == first).unwrap_or(usize::MAX)
        };
        let mut keys: Vec<&String> = self.settings.keys().collect();
        let is_name = |key: &str| key.rsplit_once('.').is_some_and(|(_, last)| last == "name");
        keys.sort_by_key(|&key| (rank(key), key != "task.kind", !is_name(key)));
        for key in keys {
            nest(&mut root, key, self.settings[key].clone());
        }
        if !self.rewards.is_empty() {
            nest(&mut root, REWARDS, self.rewards.clone().into());
        }
        root
    }
}

fn nest(into: &mut Map<String, Value>, key: &str, value: Value) {
    let Some((first, rest)) = key.split_once('.') else {
        into.insert(key.to_owned(), value);
        return;
    };
    let section = into.entry(first).or_insert_with(|| Value::Object(Map::new()));
    if !section.is_object() {
        *section = Value::Object(Map::new());
    }
    if let Value::Object(section) = section {
        nest(section, rest, value);
    }
}
