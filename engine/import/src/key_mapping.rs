//! What a key of another engine becomes here.

use super::facts::{Facts, number, truth, whole};
use serde_json::Value;

/// A key and what it becomes. A key that ends in `.**` stands for everything below it; an exact one goes before.
pub(super) type KeyRule = (&'static str, KeyMapping);

/// What becomes of a key, whatever its value.
pub(super) enum KeyMapping {
    /// The value stands under a key of ours.
    Same(&'static str),
    /// It depends on the value, or on others.
    By(fn(&SourceKey) -> MappedKey),
    /// Nothing here needs it, and why.
    NotNeeded(&'static str),
    /// Nothing here does it, and what to do instead; where it is off (false, 0, null, nothing) it is not needed.
    Off(&'static str),
}

/// A key that is asked about.
pub(super) struct SourceKey<'a> {
    pub key: &'a str,
    pub value: &'a Value,
    pub facts: &'a Facts,
}

/// What becomes of a key with its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MappedKey {
    /// It sets these keys of ours.
    Set(Vec<(String, Value)>, String),
    NotNeeded(String),
    Cannot(String),
}

/// One setting.
pub(super) fn set(key: &str, value: impl Into<Value>) -> MappedKey {
    MappedKey::Set(vec![(key.to_owned(), value.into())], String::new())
}

/// One setting, and what there is to say of it.
pub(super) fn set_noted(key: &str, value: impl Into<Value>, note: impl Into<String>) -> MappedKey {
    MappedKey::Set(vec![(key.to_owned(), value.into())], note.into())
}

pub(super) fn not_needed(why: impl Into<String>) -> MappedKey {
    MappedKey::NotNeeded(why.into())
}

pub(super) fn cannot(why: impl Into<String>) -> MappedKey {
    MappedKey::Cannot(why.into())
}

impl SourceKey<'_> {
    pub fn whole(&self) -> Option<i64> {
        whole(self.value)
    }

    pub fn number(&self) -> Option<f64> {
        number(self.value)
    }

    pub fn is_on(&self) -> bool {
        truth(self.value) == Some(true)
    }

    pub fn text(&self) -> Option<&str> {
        self.value.as_str()
    }

    /// Null.
    pub fn is_absent(&self) -> bool {
        self.value.is_null()
    }

    /// A value that is none of those that the key has.
    pub fn wrong(&self, expected: &str) -> MappedKey {
        cannot(format!("expected {expected}, found {}; correct it in the source, or write our key by hand", self.value))
    }

    /// Whether the value turns something off.
    pub fn is_off(&self) -> bool {
        match self.value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => {
                matches!(text.to_ascii_lowercase().as_str(), "" | "none" | "null" | "false" | "no" | "disabled")
            }
            Value::Number(number) => number.as_f64().is_some_and(|n| n == 0.0 || (n + 1.0).abs() < f64::EPSILON),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Bool(true) => false,
        }
    }
}

/// The rule of a key: the exact one, else the longest that stands for all below it.
pub(super) fn rule<'t>(tables: &[&'t [KeyRule]], key: &str) -> Option<&'t KeyRule> {
    let all = || tables.iter().flat_map(|table| table.iter());
    let below = |rule: &&KeyRule| {
        let start = rule.0.strip_suffix("**");
        start.is_some_and(|start| key.starts_with(start) || key == start.trim_end_matches('.'))
    };
    let exact = all().find(|rule| rule.0 == key);
    exact.or_else(|| all().filter(below).max_by_key(|rule| rule.0.len()))
}

/// What a rule makes of a key.
pub(super) fn judge(answer: &KeyMapping, asked: &SourceKey) -> MappedKey {
    match answer {
        KeyMapping::Same(_) if asked.is_absent() => not_needed("has no value in the files"),
        KeyMapping::Same(key) => set(key, plain(asked.value)),
        KeyMapping::By(decide) => decide(asked),
        KeyMapping::NotNeeded(why) => not_needed(*why),
        KeyMapping::Off(_) if asked.is_off() => not_needed("it is off, as here"),
        KeyMapping::Off(why) => cannot(*why),
    }
}

/// A value under a key of ours: whole numbers without a fraction, numbers and truth values without quotes.
pub(super) fn plain(value: &Value) -> Value {
    match value {
        Value::String(text) => match super::literal::word(text) {
            Value::Null => value.clone(),
            read => read,
        },
        Value::Number(_) => whole(value).map_or_else(|| value.clone(), Value::from),
        value => value.clone(),
    }
}
