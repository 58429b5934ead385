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
    /// Its description.
    pub description: String,
    /// True if there are keys below it.
    pub is_section: bool,
    /// Its accepted values, in words, ranges included: `integer, at least 1`.
    pub takes: String,
    /// The values that it takes by name, with what each is, where that is said.
    pub values: Vec<(String, Option<String>)>,
    /// Its default. `None` if the key is required, if a section decides itself, or if the default follows from other
    /// keys.
    pub default: Option<Value>,
    /// True if its section cannot be without it.
    pub is_required: bool,
    /// The key beside it without which it has no effect, and the values which that must have; empty where it must be
    /// on.
    pub with: Option<(String, Vec<String>)>,
}

/// All keys of a schema, in the order of the sections. One that several kinds of task or reward have stands once.
pub fn keys(schema: &Value) -> Vec<Key> {
    let mut keys = Vec::new();
    collect(schema, "", &mut keys);
    let kinds: Vec<(String, usize)> =
        keys.iter().filter_map(|key| Some((key.path.strip_suffix(".kind")?.to_owned(), key.values.len()))).collect();
    for key in &mut keys {
        let (section, _) = key.path.rsplit_once('.').unwrap_or_default();
        let known = kinds.iter().find(|(path, _)| path == section).map_or(0, |(_, count)| *count);
        if key.kinds.len() >= known {
            key.kinds.clear();
        }
    }
    keys
}

/// The paths of the keys that a name is closest to, the closest first. Their last parts count as much as whole paths.
pub fn nearest_keys<'k>(keys: &'k [Key], name: &str, count: usize) -> Vec<&'k str> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let last_part = last(name);
    let closeness = |path: &str| strsim::jaro_winkler(path, name).max(strsim::jaro_winkler(&last(path), &last_part));
    let mut near: Vec<(f64, &str)> = keys.iter().map(|key| (closeness(&key.path), key.path.as_str())).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(count).map(|(_, path)| path).collect()
}

fn collect(schema: &Value, prefix: &str, keys: &mut Vec<Key>) {
    for section in sections(schema) {
        let kind = section["properties"]["kind"]["const"].as_str();
        for (name, schema) in section["properties"].as_object().into_iter().flatten() {
            if schema.get(SAME_AS).is_some() {
                continue;
            }
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            let mut key = Key::new(path.clone(), schema, section);
            key.kinds.extend(kind.map(str::to_owned));
            merge(key, keys);
            collect(schema, &path, keys);
            if let Some(items) = items(schema) {
                collect(items, &path, keys);
            }
        }
    }
}

/// Adds a key, or what a further kind of its section says of it.
fn merge(key: Key, keys: &mut Vec<Key>) {
    let Some(known) = keys.iter_mut().find(|known| known.path == key.path) else {
        keys.push(key);
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
    fn new(path: String, schema: &Value, section: &Map<String, Value>) -> Self {
        let name = path.rsplit('.').next().unwrap_or_default();
        let required = section.get("required").and_then(Value::as_array);
        // a tag says what the section is that it stands in; of a variant with a value, the section says what it is
        let description = match (schema["description"].as_str(), schema["const"].as_str()) {
            (None, Some(_)) => "Kind of the section, which determines its other keys.",
            (description, _) => description.or_else(|| section.get("description")?.as_str()).unwrap_or_default(),
        };
        Self {
            kinds: Vec::new(),
            description: description.to_owned(),
            is_section: !sections(schema).is_empty() || items(schema).is_some(),
            takes: takes(schema),
            values: values(schema),
            default: schema.get("default").filter(|default| !default.is_object()).cloned(),
            is_required: required.is_some_and(|required| required.iter().any(|one| one == name)),
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
    let options = alternatives(schema);
    let mut named = Vec::new();
    for one in &options {
        if let (Some(name), None) = (one["const"].as_str(), one.get(SAME_AS)) {
            let described = one["description"].as_str().filter(|_| schema.get("const").is_none());
            named.push((name.to_owned(), described.map(str::to_owned)));
        }
        let listed = one["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
        named.extend(listed.map(|name| (name.to_owned(), None)));
    }
    named
}

fn takes(schema: &Value) -> String {
    let options = alternatives(schema);
    let mut words: Vec<&str> = Vec::new();
    for one in &options {
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
    for (word, phrase) in BOUNDS {
        if let Some(bound) = options.iter().find_map(|one| one.get(word)) {
            let _ = write!(text, ", {phrase} {bound}");
        }
    }
    text
}
