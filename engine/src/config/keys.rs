//! Every key of a configuration with what its schema says of it.

use super::schema::{SAME_AS, objects, schema};
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
}

/// All keys, in the order of the sections. One that several kinds of task or reward have stands once.
#[must_use]
pub fn keys() -> Vec<Key> {
    let mut all = Vec::new();
    collect(&schema(), "", &mut all);
    let kinds: Vec<(String, usize)> =
        all.iter().filter_map(|key| Some((key.path.strip_suffix("kind")?.to_owned(), key.values.len()))).collect();
    for key in &mut all {
        let (section, _) = key.path.rsplit_once('.').unwrap_or_default();
        let of = |(prefix, _): &&(String, usize)| prefix.strip_suffix('.') == Some(section);
        let known = kinds.iter().find(of).map_or(0, |(_, count)| *count);
        if key.kinds.len() >= known {
            key.kinds.clear();
        }
    }
    all
}

/// The paths of the keys that a name is closest to, the closest first. Their last parts count as much as whole paths.
#[must_use]
pub fn nearest_keys(name: &str, count: usize) -> Vec<String> {
    let last = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let own = last(name);
    let closeness = |path: &str| strsim::jaro_winkler(path, name).max(strsim::jaro_winkler(&last(path), &own));
    let all = keys().into_iter();
    let mut near: Vec<(f64, String)> = all.map(|key| (closeness(&key.path), key.path)).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(count).map(|(_, path)| path).collect()
}

fn collect(schema: &Value, prefix: &str, all: &mut Vec<Key>) {
    for object in objects(schema) {
        let Some(properties) = object.get("properties").and_then(Value::as_object) else {
            continue;
        };
        let kind = properties.get("kind").and_then(|kind| kind["const"].as_str());
        for (name, schema) in properties {
            if schema.get(SAME_AS).is_some() {
                continue;
            }
            let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            let mut key = Key::of(path.clone(), schema, is_required(object, name));
            key.kinds.extend(kind.map(str::to_owned));
            // of a variant with a value, the section says what it is
            if key.description.is_empty() {
                let whole = object.get("description").and_then(Value::as_str);
                whole.unwrap_or_default().clone_into(&mut key.description);
            }
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

fn is_required(object: &Map<String, Value>, name: &str) -> bool {
    let required = object.get("required").and_then(Value::as_array);
    required.is_some_and(|all| all.iter().any(|one| one == name))
}

/// What a schema may be: itself and, below it, what stands in its lists of alternatives.
fn alternatives(schema: &Value) -> Vec<&Value> {
    let mut found = vec![schema];
    for word in ["anyOf", "oneOf"] {
        let all = schema.get(word).and_then(Value::as_array);
        found.extend(all.into_iter().flatten().flat_map(alternatives));
    }
    found
}

/// The schema of a list's entries, where these are sections.
fn items(schema: &Value) -> Option<&Value> {
    let all = alternatives(schema);
    let items = all.into_iter().find_map(|one| one.get("items"))?;
    Some(items).filter(|items| !objects(items).is_empty())
}

impl Key {
    fn of(path: String, schema: &Value, is_required: bool) -> Self {
        let all = alternatives(schema);
        let description = schema["description"].as_str().unwrap_or_default();
        let default = schema.get("default").filter(|default| !default.is_object());
        // a tag says what the section is that it stands in
        let description = match (description, schema["const"].as_str()) {
            ("", Some(_)) => "Kind of the section, which determines its other keys.",
            (description, _) => description,
        };
        Self {
            description: description.to_owned(),
            is_section: !objects(schema).is_empty() || items(schema).is_some(),
            takes: takes(&all),
            values: values(&all),
            default: default.cloned(),
            is_required,
            kinds: Vec::new(),
            path,
        }
    }
}

/// The values that are known by name.
fn values(all: &[&Value]) -> Vec<(String, Option<String>)> {
    let mut found = Vec::new();
    for one in all {
        let described = one["description"].as_str().map(str::to_owned);
        if let (Some(name), None) = (one["const"].as_str(), one.get(SAME_AS)) {
            let own = described.filter(|_| all.len() > 1);
            found.push((name.to_owned(), own));
        }
        for name in one["enum"].as_array().into_iter().flatten() {
            found.extend(name.as_str().map(|name| (name.to_owned(), None)));
        }
    }
    found
}

fn takes(all: &[&Value]) -> String {
    let mut words: Vec<&str> = Vec::new();
    let named = |one: &Value| one.get("const").is_some() || one.get("enum").is_some();
    for one in all {
        let types = match &one["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
            other => other.as_str().into_iter().collect::<Vec<_>>(),
        };
        for kind in types {
            let word = match kind {
                "string" if named(one) => "one of the values below",
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
    for (word, said) in
        [("minimum", "at least"), ("exclusiveMinimum", "above"), ("maximum", "at most"), ("exclusiveMaximum", "below")]
    {
        let bound = all.iter().find_map(|one| one.get(word));
        if let Some(bound) = bound {
            let _ = write!(text, ", {said} {bound}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key<'k>(all: &'k [Key], path: &str) -> &'k Key {
        let found = all.iter().find(|key| key.path == path);
        found.unwrap_or_else(|| panic!("no key {path}"))
    }

    #[test]
    fn a_key_is_told_with_its_default_its_range_and_its_values() {
        let all = keys();
        let n = key(&all, "rollout.n");
        assert_eq!((n.takes.as_str(), n.default.as_ref()), ("integer, at least 1", Some(&8.into())));
        let home = key(&all, "memory.param_offload");
        let names: Vec<&str> = home.values.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["none", "idle", "streamed"]);
        assert!(home.values[2].1.as_ref().is_some_and(|what| what.contains("segment by segment")));
        assert_eq!(home.default, Some("none".into()));
        assert!(key(&all, "output").is_required && !n.is_required);
        assert!(key(&all, "memory.reference").is_section);
        assert!(!key(&all, "model.arch").is_section, "its keys are transformers'");
    }

    #[test]
    fn keys_of_some_kinds_of_task_or_reward_say_so() {
        let all = keys();
        assert_eq!(key(&all, "task.difficulty").kinds, ["arithmetic"]);
        assert_eq!(key(&all, "task.rewards.tolerance").kinds, ["number", "math"]);
        assert!(key(&all, "task.rewards.weight").kinds.is_empty());
        let kinds = &key(&all, "task.rewards.kind").values;
        assert!(kinds.len() >= 7, "{kinds:?}");
    }

    #[test]
    fn every_key_is_described_and_says_what_it_takes() {
        let all = keys();
        assert!(all.len() > 180, "{}", all.len());
        for key in &all {
            assert!(key.description.len() > 10, "{}: {:?}", key.path, key.description);
            assert!(!key.takes.is_empty(), "{} takes nothing", key.path);
        }
    }
}
