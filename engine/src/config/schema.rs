//! The configuration as a JSON Schema, for editors and for finding every mistake of a file at once.
//!
//! Keys, types, descriptions and defaults are derived from the structs. What serde reads and the derive does not see is
//! added here: sections that `null` turns off, `objective: grpo` for `objective: {name: grpo}`, second names, and the
//! ranges of numbers.

mod aliases;
mod limits;

pub(super) use aliases::SAME_AS;

use super::run::RunConfig;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};
use std::sync::OnceLock;

/// Sections that `null` turns off.
pub(super) const SECTIONS: [&str; 9] =
    ["task", "objective", "rollout", "update", "optim", "critic", "warmup", "sft", "memory"];

/// The JSON Schema (draft 7, without references) of a configuration file.
///
/// A number's range is the range that the key takes by itself; what keys say together is not in a schema, and
/// [`RunConfig::problems`] finds it.
#[must_use]
pub fn schema() -> Value {
    let mut schema = derived();
    place_defaults(&mut schema, "", &mut Vec::new());
    tidy(&mut schema);
    name_objective(&mut schema);
    limits::set(&mut schema, "");
    aliases::add(&mut schema);
    for section in SECTIONS {
        if let Some(own) = schema["properties"].get_mut(section) {
            allow_null(own);
        }
    }
    schema["title"] = "Firebrick configuration".into();
    schema
}

/// The schema as the derives make it: a section has its default as one object.
fn derived() -> Value {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<RunConfig>().to_value()
}

/// Defaults that a section has in its place and not by its type, as `critic.optim.lr`: JSON pointers and values. A file
/// that sets one key of such a section keeps them for the others.
pub(super) fn defaults_by_place() -> &'static [(String, Value)] {
    static FOUND: OnceLock<Vec<(String, Value)>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let mut found = Vec::new();
        place_defaults(&mut derived(), "", &mut found);
        found
    })
}

/// Gives the keys of a section the defaults that the section has in its place, and adds those that differ from the
/// type's to `found`.
fn place_defaults(schema: &mut Value, prefix: &str, found: &mut Vec<(String, Value)>) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    for word in ["anyOf", "oneOf"] {
        for one in map.get_mut(word).and_then(Value::as_array_mut).into_iter().flatten() {
            place_defaults(one, prefix, found);
        }
    }
    let whole = map.get("default").and_then(Value::as_object).cloned().unwrap_or_default();
    for (name, own) in map.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten() {
        let pointer = format!("{prefix}/{name}");
        if let (Some(value), Some(own)) = (whole.get(name), own.as_object_mut()) {
            let before = own.insert("default".to_owned(), value.clone());
            if !value.is_object() && before.is_some_and(|before| before != *value) {
                found.push((pointer.clone(), value.clone()));
            }
        }
        place_defaults(own, &pointer, found);
    }
}

/// Removes what only Rust knows: number formats, links of documentation, and whole sections as defaults, whose keys
/// have their own.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.remove("format");
            if map.get("default").is_some_and(Value::is_object) {
                map.remove("default");
            }
            if let Some(Value::String(text)) = map.get_mut("description") {
                *text = plain(text);
            }
            for (word, own) in map {
                match own {
                    // these are keys of a configuration, whatever they are called
                    Value::Object(keys) if word == "properties" => keys.values_mut().for_each(tidy),
                    own => tidy(own),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// Text of a doc comment without the targets of its links, on one line a paragraph.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('[') {
        let (before, from) = rest.split_at(at);
        plain.push_str(before);
        let link = from.find("](").and_then(|middle| Some((middle, middle + from[middle..].find(')')?)));
        match link {
            Some((middle, end)) if !from[1..middle].contains('[') => {
                plain.push_str(&from[1..middle]);
                rest = &from[end + 1..];
            }
            _ => {
                plain.push('[');
                rest = &from[1..];
            }
        }
    }
    plain.push_str(rest);
    let plain = plain.replace("[`", "`").replace("`]", "`");
    let paragraphs: Vec<String> =
        plain.split("\n\n").map(|lines| lines.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    paragraphs.join("\n\n")
}

/// `objective` may be a name alone.
fn name_objective(schema: &mut Value) {
    let Some(section) = schema["properties"].get_mut("objective") else {
        return;
    };
    let whole = section.take();
    let description = whole["description"].clone();
    let mut name = whole["properties"]["name"].clone();
    if let Some(name) = name.as_object_mut() {
        name.remove("default");
        name.insert("description".into(), "The name of the algorithm.".into());
    }
    *section = json!({"description": description, "anyOf": [name, whole]});
}

fn allow_null(schema: &mut Value) {
    let Some(map) = schema.as_object_mut() else {
        return;
    };
    if let Some(Value::String(kind)) = map.get("type") {
        let kinds = json!([kind, "null"]);
        map.insert("type".into(), kinds);
        return;
    }
    let is_null = |schema: &Value| schema["type"] == "null";
    if let Some(Value::Array(all)) = map.get_mut("anyOf")
        && !all.iter().any(is_null)
    {
        all.push(json!({"type": "null"}));
    }
}

/// Every object of a schema that has properties, with its properties: the schema itself, or what it may be instead.
pub(super) fn objects(schema: &Value) -> Vec<&Map<String, Value>> {
    let mut found: Vec<&Map<String, Value>> = Vec::new();
    if let Some(map) = schema.as_object()
        && map.contains_key("properties")
    {
        found.push(map);
    }
    for word in ["anyOf", "oneOf"] {
        let all = schema.get(word).and_then(Value::as_array);
        found.extend(all.into_iter().flatten().flat_map(objects));
    }
    found
}

#[cfg(test)]
mod tests;
