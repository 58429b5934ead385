//! What a key of another engine becomes here: the rules of its tables, and the functions that decide where a rule does
//! not.

use super::facts::{Facts, number, truth, whole};
use super::literal::word;
use serde_json::Value;
use std::collections::BTreeMap;

/// What every table of keys is written with.
pub(super) mod prelude {
    pub(crate) use super::KeyMapping::{By, If, NotNeeded, Off, On, Same, To, Under};
    pub(crate) use super::{KeyTable, MappedKey, SourceKey, absent, cannot, not_needed, off, plain, set, set_all};
}

/// A section, which its keys begin with, and its rules: names with spaces between them, and what becomes of each. A
/// name that ends in `**` stands for everything below it; an exact one goes before. `a.{b,c}` is two names.
pub(super) type KeyTable = (&'static str, &'static [(&'static str, KeyMapping)]);

/// What becomes of a key, whatever its value.
pub(super) enum KeyMapping {
    /// The value stands under a key of ours.
    Same(&'static str),
    /// The same, under its own last name in a section of ours.
    Under(&'static str),
    /// Where it is on, a key of ours has this value.
    On(&'static str, &'static str),
    /// It depends on the value, or on others.
    By(fn(&SourceKey) -> MappedKey),
    /// The same, for a key of ours.
    To(fn(&SourceKey, &str) -> MappedKey, &'static str),
    /// Another rule where a condition holds; elsewhere nothing needs it, and why.
    If(fn(&SourceKey) -> bool, &'static str, &'static Self),
    /// Nothing here needs it, and why.
    NotNeeded(&'static str),
    /// Nothing here does it, and what to do instead; where it is off (false, 0, null, nothing) it is not needed.
    Off(&'static str),
}

/// The rules of an engine by their names.
pub(super) struct Rules(BTreeMap<String, &'static KeyMapping>);

impl Rules {
    pub fn of(tables: &[KeyTable]) -> Self {
        Self(named(tables).collect())
    }

    /// The rule of a key, and its name: the exact one, else the longest that stands for all below it.
    pub fn find(&self, key: &str) -> Option<(&str, &'static KeyMapping)> {
        let sections = std::iter::successors(Some(key), |key| key.rsplit_once('.').map(|(section, _)| section));
        let mut below = sections.map(|section| format!("{section}.**"));
        let found = self.0.get_key_value(key).or_else(|| below.find_map(|name| self.0.get_key_value(&name)));
        found.map(|(name, mapping)| (name.as_str(), *mapping))
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// All rules of tables with their whole names.
pub(super) fn named(tables: &[KeyTable]) -> impl Iterator<Item = (String, &'static KeyMapping)> {
    let rules = tables.iter().flat_map(|(section, rules)| rules.iter().map(move |rule| (section, rule)));
    rules.flat_map(|(section, (names, mapping))| {
        names.split_whitespace().flat_map(expanded).map(move |name| (format!("{section}{name}"), mapping))
    })
}

/// `a.{b,c}` as `a.b` and `a.c`.
fn expanded(name: &str) -> Vec<String> {
    let parts = name.split_once('{').and_then(|(start, rest)| Some((start, rest.split_once('}')?)));
    let Some((start, (middle, end))) = parts else {
        return vec![name.to_owned()];
    };
    middle.split(',').flat_map(|own| expanded(&format!("{start}{own}{end}"))).collect()
}

/// A key that is asked about.
#[derive(Clone, Copy)]
pub(super) struct SourceKey<'a> {
    pub key: &'a str,
    pub value: &'a Value,
    pub facts: &'a Facts,
}

/// What becomes of a key with its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MappedKey {
    /// It sets these keys of ours; what there is to say of it.
    Set(Vec<(String, Value)>, String),
    NotNeeded(String),
    Cannot(String),
}

impl MappedKey {
    /// What there is to say of its settings.
    pub fn noted(self, note: impl Into<String>) -> Self {
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

    /// The same key with another value.
    pub fn with(self, value: &'a Value) -> Self {
        Self { value, ..self }
    }

    /// The section that it stands in.
    pub fn section(&self) -> &'a str {
        self.key.rsplit_once('.').map_or("", |(section, _)| section)
    }

    /// Its last name.
    pub fn name(&self) -> &'a str {
        self.key.rsplit('.').next().unwrap_or(self.key)
    }

    /// Another key of its section.
    pub fn beside(&self, name: &str) -> Option<&'a Value> {
        self.facts.value(&format!("{}.{name}", self.section()))
    }

    /// A value that is none of those that the key has; null is none at all.
    pub fn wrong(&self, expected: &str) -> MappedKey {
        if self.is_absent() {
            return absent();
        }
        cannot(format!("expected {expected}, found {}; correct it in the source, or write our key by hand", self.value))
    }

    /// The same, of a value that may be off.
    pub fn off_or_wrong(&self, expected: &str) -> MappedKey {
        if self.is_off() { absent() } else { self.wrong(expected) }
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

/// What a rule makes of a key.
pub(super) fn judge(mapping: &KeyMapping, asked: &SourceKey) -> MappedKey {
    match mapping {
        KeyMapping::Same(_) | KeyMapping::Under(_) if asked.is_absent() => absent(),
        KeyMapping::Under(section) => set(&format!("{section}.{}", asked.name()), plain(asked.value)),
        KeyMapping::Same(key) => set(key, plain(asked.value)),
        KeyMapping::On(key, value) if asked.is_on() => set(key, word(value)),
        KeyMapping::On(..) => off(),
        KeyMapping::By(decide) => decide(asked),
        KeyMapping::To(decide, key) => decide(asked, key),
        KeyMapping::If(holds, _, mapping) if holds(asked) => judge(mapping, asked),
        KeyMapping::If(_, why, _) | KeyMapping::NotNeeded(why) => not_needed(*why),
        KeyMapping::Off(_) if asked.is_off() => not_needed("it is off, as here"),
        KeyMapping::Off(why) => cannot(*why),
    }
}

/// A value under a key of ours: whole numbers without a fraction, numbers and truth values without quotes.
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
