//! Every key of a configuration with what its schema says of it.

use crate::check::{BOUNDS, word};
use crate::schema::{SAME_AS, alternatives, sections};
use serde_json::{Map, Value};
use std::fmt::Write;

/// A key of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Key {
    /// Its path, with dots. Entries of lists have no number: `task.rewards.weight`.
    pub path: String,
    /// The kinds of task or reward that it is a key of, by their `kind`; empty where it belongs to all of them, or to
    /// no such section.
    pub kinds: Vec<String>,
    /// What it is.
    pub description: String,
    /// Whether there are keys below it.
    pub is_section: bool,
    /// What it takes, in words, ranges included: `integer, at least 1`.
    pub takes: String,
    /// The values that it takes by name, with what each is, where that is said.
    pub values: Vec<(String, Option<String>)>,
    /// What it is where it is left out. None where it has to be given, where a section decides itself, or where that
    /// follows from other keys.
    pub default: Option<Value>,
    /// Whether its section cannot be without it.
    pub is_required: bool,
    /// The key beside it without which it has no effect, and the values which that must have; empty where it must be on.
    pub with: Option<(String, Vec<String>)>,
}

/// All keys of a schema, in the order of the sections. One that several kinds of task or reward have stands once.
#[must_use]
pub fn keys(schema: &Value) -> Vec<Key> {
    let mut all = Vec::new();
    collect(schema, "", &mut all);
    let kinds: Vec<(String, usize)> =
        all.iter().filter_map(|key| Some((key.path.strip_suffix(".kind")?.to_owned(), key.values.len()))).collect();
    for key in &mut all {
        let (section, _) = key.path.rsplit_once('.').unwrap_or_default();
        let known = kinds.iter().find(|(path, _)| path == section).map_or(0, |(_, count)| *count);
        if key.kinds.len() >= known {
            key.kinds.clear();
        }
    }
    all
}

/// The paths of the keys that a name is closest to, the closest first. Their last parts count as much as whole paths.
#[must_use]
pub fn nearest_keys<'k>(keys: &'k [Key], name: &str, count: usize) -> Vec<&'k str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let own = last(name);
    let closeness = |path: &str| strsim::jaro_winkler(path, name).max(strsim::jaro_winkler(&last(path), &own));
    let mut near: Vec<(f64, &str)> = keys.iter().map(|key| (closeness(&key.path), key.path.as_str())).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(count).map(|(_, path)| path).collect()
}

fn collect(schema: &Value, prefix: &str, all: &mut Vec<Key>) {
    for section in sections(schema) {
        let kind = section["properties"]["kind"]["const"].as_str();
        for (name, schema) in section["properties"].as_object().into_iter().flatten() {
            if schema.get(SAME_AS).is_some() {
                continue;
            }
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            let mut key = Key::of(path.clone(), schema, section);
            key.kinds.extend(kind.map(str::to_owned));
            merge(key, all);
            collect(schema, &path, all);
            if let Some(items) = items(schema) {
                collect(items, &path, all);
            }
        }
    }
}

/// Adds a key, or what a further kind of its section says of it.
fn merge(key: Key, all: &mut Vec<Key>) {
    let Some(known) = all.iter_mut().find(|known| known.path == key.path) else {
        all.push(key);
        return;
    };
    for value in key.values {
        if !known.values.contains(&value) {
            known.values.push(value);
        }
    }
    for kind in key.kinds {
        if !known.kinds.contains(&kind) {
            known.kinds.push(kind);
        }
    }
    known.is_required &= key.is_required;
}

/// The schema of a list's entries, where these are sections.
fn items(schema: &Value) -> Option<&Value> {
    let items = alternatives(schema).into_iter().find_map(|one| one.get("items"))?;
    Some(items).filter(|items| !sections(items).is_empty())
}

impl Key {
    /// The key with a schema that is among the properties of a section.
    fn of(path: String, schema: &Value, section: &Map<String, Value>) -> Self {
        let name = path.rsplit('.').next().unwrap_or_default();
        let required = section.get("required").and_then(Value::as_array);
        // a tag says what the section is that it stands in; of a variant with a value, the section says what it is
        let description = match (schema["description"].as_str(), schema["const"].as_str()) {
            (None, Some(_)) => "Kind of the section, which determines its other keys.",
            (own, _) => own.or_else(|| section.get("description")?.as_str()).unwrap_or_default(),
        };
        Self {
            kinds: Vec::new(),
            description: description.to_owned(),
            is_section: !sections(schema).is_empty() || items(schema).is_some(),
            takes: takes(schema),
            values: values(schema),
            default: schema.get("default").filter(|default| !default.is_object()).cloned(),
            is_required: required.is_some_and(|all| all.iter().any(|one| one == name)),
            with: schema.get("x-with").and_then(|with| match with {
                Value::Object(with) => with
                    .iter()
                    .next()
                    .map(|(key, values)| (key.clone(), values.as_array().into_iter().flatten().map(word).collect())),
                other => other.as_str().map(|key| (key.to_owned(), Vec::new())),
            }),
            path,
        }
    }
}

/// The values that are known by name.
fn values(schema: &Value) -> Vec<(String, Option<String>)> {
    let all = alternatives(schema);
    let mut found = Vec::new();
    for one in &all {
        if let (Some(name), None) = (one["const"].as_str(), one.get(SAME_AS)) {
            let described = one["description"].as_str().filter(|_| schema.get("const").is_none());
            found.push((name.to_owned(), described.map(str::to_owned)));
        }
        let listed = one["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        found.extend(listed.map(|name| (name.to_owned(), None)));
    }
    found
}

fn takes(schema: &Value) -> String {
    let all = alternatives(schema);
    let mut words: Vec<&str> = Vec::new();
    for one in &all {
        let is_named = one.get("const").is_some() || one.get("enum").is_some();
        let types = match &one["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
            other => other.as_str().into_iter().collect::<Vec<_>>(),
        };
        for kind in types {
            let word = match kind {
                "string" if is_named => "one of the values below",
                "string" => "text",
                "boolean" => "true or false",
                "array" => "list",
                "object" => "section",
                other => other,
            };
            if !words.contains(&word) {
                words.push(word);
            }
        }
    }
    if words.is_empty() {
        words.push("any value");
    }
    let mut text = words.join(" or ");
    for (word, said) in BOUNDS {
        if let Some(bound) = all.iter().find_map(|one| one.get(word)) {
            let _ = write!(text, ", {said} {bound}");
        }
    }
    text
}
