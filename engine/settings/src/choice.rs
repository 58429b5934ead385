//! Enums whose variants are sections, written flat: the name of the variant is a key, and its settings are keys beside
//! it.

use crate::schema::derived;
use schemars::{JsonSchema, Schema};
use serde::de::{DeserializeOwned, Deserializer, Error};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Reads such an enum from the keys of its section, for `#[serde(flatten, deserialize_with = "flat_choice")]`. Without
/// the key that names a variant, it is the default one.
///
/// # Errors
/// An unknown variant, or a setting of the wrong type.
pub fn flat_choice<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + DeserializeOwned + Serialize,
{
    let mut keys = Map::<String, Value>::deserialize(deserializer)?;
    let default = default_keys::<T>();
    if default.first().is_some_and(|(tag, _)| !keys.contains_key(tag)) {
        keys.extend(default.into_iter().take(1));
    }
    T::deserialize(Value::Object(keys)).map_err(D::Error::custom)
}

/// The keys of the default variant, its name first.
fn default_keys<T: Default + Serialize>() -> Vec<(String, Value)> {
    match serde_json::to_value(T::default()) {
        Ok(Value::Object(keys)) => keys.into_iter().collect(),
        _ => Vec::new(),
    }
}

/// Adds the keys of an internally tagged enum to the schema of a section, behind the key `after`: the name of a
/// variant, with the enum's documentation, and the settings of all variants, each with those that it goes with.
pub fn add_choice<T: Default + JsonSchema + Serialize>(schema: &mut Schema, after: &str) {
    let union = derived::<T>();
    let Some((tag, default)) = default_keys::<T>().into_iter().next() else { return };
    let (mut names, mut settings) = (Vec::new(), Map::<String, Value>::new());
    for variant in union["oneOf"].as_array().into_iter().flatten() {
        let mut name = variant["properties"][&tag].clone();
        for word in ["description", "x-alias"] {
            if let Some(text) = variant.get(word) {
                name[word] = text.clone();
            }
        }
        for (key, schema) in variant["properties"].as_object().into_iter().flatten().filter(|(key, _)| **key != tag) {
            let setting = settings.entry(key).or_insert_with(|| schema.clone());
            if let Some(setting) = setting.as_object_mut() {
                let with = setting.entry("x-with").or_insert_with(|| json!({&tag: []}));
                with[&tag].as_array_mut().into_iter().for_each(|with| with.push(name["const"].clone()));
            }
        }
        names.push(name);
    }
    let choice = json!({"description": union["description"], "default": default, "oneOf": names});
    if let Some(properties) = schema.ensure_object().get_mut("properties").and_then(Value::as_object_mut) {
        let mut added = Some(std::iter::once((tag, choice)).chain(settings));
        for (name, key) in std::mem::take(properties) {
            let is_last = name == after;
            properties.insert(name, key);
            properties.extend(added.take_if(|_| is_last).into_iter().flatten());
        }
    }
}
