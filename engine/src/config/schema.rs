//! JSON Schema of the configuration, for editors and for finding all problems of a file at once.

use super::run::RunConfig;
use firebrick_settings::{Key, schema_of};
use serde_json::{Value, json};
use std::sync::LazyLock;

/// The schema, made once.
pub(super) static SCHEMA: LazyLock<Value> = LazyLock::new(schema);
/// Its keys.
pub(super) static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| firebrick_settings::keys(&SCHEMA));

/// The JSON Schema (draft 7, without references) of a configuration file.
///
/// The schema has no constraints between keys, which [`RunConfig::problems`] checks.
pub fn schema() -> Value {
    let mut schema = schema_of::<RunConfig>();
    let required = schema["required"].clone();
    for (name, section) in schema["properties"].as_object_mut().into_iter().flatten() {
        if name == "objective" {
            name_objective(section);
        }
        if !required.as_array().is_some_and(|required| required.iter().any(|key| key == name)) {
            allow_null(section);
        }
    }
    schema["title"] = "Firebrick configuration".into();
    schema
}

/// All keys of a configuration, in the order of the sections.
pub fn keys() -> Vec<Key> {
    KEYS.clone()
}

/// Paths of the keys that are most similar to a name, the most similar first.
pub fn nearest_keys(name: &str, count: usize) -> Vec<String> {
    firebrick_settings::nearest_keys(&KEYS, name, count).into_iter().map(str::to_owned).collect()
}

/// Allows a name as `objective`.
fn name_objective(section: &mut Value) {
    let mut whole = section.take();
    let description = whole.as_object_mut().and_then(|whole| whole.remove("description"));
    let mut name = whole["properties"]["name"].clone();
    if let Some(name) = name.as_object_mut() {
        name.remove("default");
        name.insert("description".into(), "The name of the algorithm.".into());
    }
    *section = json!({"description": description, "anyOf": [name, whole]});
}

/// Allows null, which turns a section off.
fn allow_null(section: &mut Value) {
    if section["type"] == "object" {
        section["type"] = json!(["object", "null"]);
    } else if let Some(Value::Array(types)) = section.get_mut("anyOf")
        && !types.iter().any(|kind| kind["type"] == "null")
    {
        types.push(json!({"type": "null"}));
    }
}

#[cfg(test)]
mod tests;
