//! A key of another engine with its value, and its conversion.

use super::facts::{Facts, number, truth, whole};
use super::literal::word;
use serde_json::Value;

/// A key to convert.
#[derive(Clone, Copy)]
pub(super) struct SourceKey<'a> {
    pub key: &'a str,
    pub value: &'a Value,
    pub facts: &'a Facts,
}

/// Conversion of a key with its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MappedKey {
    /// Firebrick settings, and a note on them.
    Set(Vec<(String, Value)>, String),
    NotNeeded(String),
    Cannot(String),
}

impl MappedKey {
    /// Attaches a note to settings.
    pub fn with_note(self, note: impl Into<String>) -> Self {
        match self {
            Self::Set(settings, _) => Self::Set(settings, note.into()),
            other => other,
        }
    }
}

/// One setting.
pub(super) fn set(key: &str, value: impl Into<Value>) -> MappedKey {
    set_all([(key, value.into())])
}

/// Several settings.
pub(super) fn set_all<K: Into<String>>(settings: impl IntoIterator<Item = (K, Value)>) -> MappedKey {
    MappedKey::Set(settings.into_iter().map(|(key, value)| (key.into(), value)).collect(), String::new())
}

pub(super) fn not_needed(why: impl Into<String>) -> MappedKey {
    MappedKey::NotNeeded(why.into())
}

pub(super) fn cannot(why: impl Into<String>) -> MappedKey {
    MappedKey::Cannot(why.into())
}

pub(super) fn absent() -> MappedKey {
    not_needed("has no value in the files")
}

pub(super) fn off() -> MappedKey {
    not_needed("off, as here by default")
}

impl<'a> SourceKey<'a> {
    pub fn whole(&self) -> Option<i64> {
        whole(self.value)
    }

    /// A whole number above zero.
    pub fn count(&self) -> Option<i64> {
        self.whole().filter(|n| *n > 0)
    }

    pub fn number(&self) -> Option<f64> {
        number(self.value)
    }

    /// Firebrick's name of the float type.
    pub fn float(&self) -> Option<&'static str> {
        float(self.text())
    }

    pub fn is_on(&self) -> bool {
        truth(self.value) == Some(true)
    }

    pub fn text(&self) -> Option<&'a str> {
        self.value.as_str()
    }

    /// Null.
    pub fn is_absent(&self) -> bool {
        self.value.is_null()
    }

    /// Copies the key with another value.
    pub fn with(self, value: &'a Value) -> Self {
        Self { value, ..self }
    }

    /// Its section.
    pub fn section(&self) -> &'a str {
        self.key.rsplit_once('.').map_or("", |(section, _)| section)
    }

    /// Its last name.
    pub fn name(&self) -> &'a str {
        self.key.rsplit('.').next().unwrap_or(self.key)
    }

    /// Value of another key of its section.
    pub fn sibling(&self, name: &str) -> Option<&'a Value> {
        self.facts.value(&format!("{}.{name}", self.section()))
    }

    /// Value of another key; a leading dot means its section.
    pub fn lookup(&self, key: &str) -> Option<&'a Value> {
        key.strip_prefix('.').map_or_else(|| self.facts.value(key), |name| self.sibling(name))
    }

    /// Outcome of an invalid value; null counts as absent.
    pub fn wrong(&self, expected: &str) -> MappedKey {
        if self.is_absent() {
            return absent();
        }
        cannot(format!("expected {expected}, found {}; correct it in the source, or write our key by hand", self.value))
    }

    /// Outcome of an invalid value of a key that can be off.
    pub fn off_or_wrong(&self, expected: &str) -> MappedKey {
        if self.is_off() { absent() } else { self.wrong(expected) }
    }

    /// Returns true if the value turns something off.
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

/// A value in YAML's plain form: integers without a fraction, numbers and booleans without quotes.
pub(super) fn plain(value: &Value) -> Value {
    match value {
        Value::String(text) => match word(text) {
            Value::Null => value.clone(),
            read => read,
        },
        Value::Number(_) => whole(value).map_or_else(|| value.clone(), Value::from),
        value => value.clone(),
    }
}

/// Firebrick's name of a float type.
pub(super) fn float(name: Option<&str>) -> Option<&'static str> {
    match name?.trim_start_matches("torch.").to_ascii_lowercase().as_str() {
        "bfloat16" | "bf16" => Some("bf16"),
        "float16" | "fp16" | "half" => Some("f16"),
        "float32" | "fp32" | "float" => Some("f32"),
        _ => None,
    }
}
