//! The schema of a type, as editors, explanations and the check read it.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// Other names of a key or value.
const ALIAS: &str = "x-alias";
/// Marks a key or value as another name of this one.
pub(crate) const SAME_AS: &str = "x-same-as";

/// The JSON Schema (draft 7, without references) of a type. A key has the default of its place: `critic.optim.lr` that
/// of `critic`, not of the optimizer's type.
pub fn schema_of<T: JsonSchema>() -> Value {
    let mut schema = derived::<T>();
    tidy(&mut schema);
    schema
}

/// The schema as the derive makes it.
pub(crate) fn derived<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft07().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

/// Moves defaults of sections to their keys, adds other names, and removes Rust's number formats and line breaks.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.remove("format");
            if let Some(Value::String(text)) = map.get_mut("description") {
                let paragraphs = text.split("\n\n").map(|lines| lines.split_whitespace().collect::<Vec<_>>().join(" "));
                *text = paragraphs.collect::<Vec<_>>().join("\n\n");
            }
            let whole = map.get("default").and_then(Value::as_object).cloned();
            if whole.is_some() {
                map.remove("default");
            }
            let required = map.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
            if let Some(Value::Object(properties)) = map.get_mut("properties") {
                for (name, default) in whole.into_iter().flatten() {
                    if let Some(Value::Object(key)) = properties.get_mut(&name) {
                        key.insert("default".to_owned(), default);
                    }
                }
                for required in &required {
                    let key = required.as_str().and_then(|name| properties.get_mut(name)?.as_object_mut());
                    key.and_then(|key| key.remove("default"));
                }
                add_names_of_keys(properties);
                properties.values_mut().for_each(tidy);
            }
            if let Some(Value::Array(all)) = map.get_mut("oneOf") {
                add_names_of_values(all);
            }
            map.iter_mut().filter(|(word, _)| *word != "properties").for_each(|(_, value)| tidy(value));
        }
        Value::Array(list) => list.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn add_names_of_keys(properties: &mut Map<String, Value>) {
    let aliased = |(name, key): (&String, &mut Value)| Some((name.clone(), key.as_object_mut()?.remove(ALIAS)?));
    let aliased: Vec<(String, Value)> = properties.iter_mut().filter_map(aliased).collect();
    for (name, others) in aliased {
        let mut same = properties[&name].clone();
        same["description"] = format!("The same as `{name}`.").into();
        same[SAME_AS] = name.into();
        same.as_object_mut().and_then(|same| same.remove("default"));
        let others = others.as_array().into_iter().flatten().filter_map(Value::as_str);
        properties.extend(others.map(|other| (other.to_owned(), same.clone())));
    }
}

fn add_names_of_values(values: &mut Vec<Value>) {
    let aliased = |one: &mut Value| Some((one["const"].as_str()?.to_owned(), one.as_object_mut()?.remove(ALIAS)?));
    let aliased: Vec<(String, Value)> = values.iter_mut().filter_map(aliased).collect();
    for (value, others) in aliased {
        values.extend(others.as_array().into_iter().flatten().map(|other| {
            json!({"type": "string", "const": other, "description": format!("The same as `{value}`."), SAME_AS: value})
        }));
    }
}

/// The alternatives of a schema and of those below them, or the schema itself.
pub(crate) fn alternatives(schema: &Value) -> Vec<&Value> {
    let below = ["anyOf", "oneOf"].iter().find_map(|word| schema.get(word)?.as_array());
    below.map_or_else(|| vec![schema], |options| options.iter().flat_map(alternatives).collect())
}

/// The alternatives that are sections with known keys.
pub(crate) fn sections(schema: &Value) -> Vec<&Map<String, Value>> {
    let objects = alternatives(schema).into_iter().filter_map(Value::as_object);
    objects.filter(|one| one.contains_key("properties")).collect()
}

/// Fills in the defaults of keys that the sections of a value leave out. A type's own default can be another than that
/// of the place where it stands.
pub fn lay_defaults(schema: &Value, value: &mut Value) {
    let (&[section], Value::Object(map)) = (&sections(schema)[..], value) else { return };
    for (name, key) in section["properties"].as_object().into_iter().flatten() {
        match (map.get_mut(name), key.get("default")) {
            (Some(written), _) => lay_defaults(key, written),
            (None, Some(default)) if !default.is_null() => drop(map.insert(name.clone(), default.clone())),
            _ => {}
        }
    }
}
