//! Types of arguments that a call has as strings, by the schema of its tool: as in transformers' `parse_response`
//! with `tools`.

use super::ToolCall;
use firebrick_spec::json::{number, parse};
use serde_json::Value;

/// Gives a call's strings the types of its tool's schema. Unsuitable values stay strings.
pub(super) fn convert(call: &mut ToolCall, tools: &Value) {
    let mut tools = tools.as_array().into_iter().flatten().map(|tool| tool.get("function").unwrap_or(tool));
    let Some(tool) = tools.find(|tool| tool["name"] == call.name.as_str()) else { return };
    let properties = &tool["parameters"]["properties"];
    for (name, argument) in &mut call.arguments {
        let schema = &properties[name.as_str()];
        if let Value::String(text) = argument
            && let Some(typed) = types(schema).into_iter().find_map(|kind| typed(text, kind))
        {
            *argument = typed;
        }
    }
}

/// The types that a schema allows.
fn types(schema: &Value) -> Vec<&str> {
    let mut types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(list) => list.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    for union in ["anyOf", "oneOf"] {
        types.extend(schema[union].as_array().into_iter().flatten().flat_map(self::types));
    }
    if schema["nullable"] == true && !types.contains(&"null") {
        types.push("null");
    }
    types
}

/// A text as a value of a type, if it is one.
fn typed(text: &str, kind: &str) -> Option<Value> {
    let word = text.trim();
    match kind {
        "integer" => integer(word).or_else(|| whole(word)),
        "number" => {
            let float = || word.parse().ok().filter(|value: &f64| value.is_finite()).map(Value::from);
            let without_point = !word.contains('.');
            integer(word).or_else(|| whole(word).filter(|_| without_point)).or_else(float)
        }
        "boolean" => match word.to_lowercase().as_str() {
            "true" | "1" => Some(true.into()),
            "false" | "0" => Some(false.into()),
            _ => None,
        },
        "null" => matches!(word, "null" | "None").then_some(Value::Null),
        "object" => parse(text.as_bytes()).ok().filter(Value::is_object),
        "array" => parse(text.as_bytes()).ok().filter(Value::is_array),
        _ => None,
    }
}

/// An integer of any length.
fn integer(word: &str) -> Option<Value> {
    let (sign, digits) = match word.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", word.strip_prefix('+').unwrap_or(word)),
    };
    let is_integer = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    let digits = digits.trim_start_matches('0');
    is_integer.then(|| if digits.is_empty() { 0.into() } else { number(&format!("{sign}{digits}")) })
}

/// A whole number that is written as a float, such as `3.0`.
fn whole(word: &str) -> Option<Value> {
    let float: f64 = word.parse().ok()?;
    (float.is_finite() && float.fract() == 0.0).then(|| integer(&format!("{float:.0}")))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The arguments of a call, each with its schema.
    fn converted(arguments: &[(&str, &str)]) -> Vec<Value> {
        let properties = json!({
            "i": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
            "o": {"type": "object"}, "a": {"type": "array"}, "n": {"type": "integer", "nullable": true},
            "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "t": {"type": ["boolean", "number"]}, "w": {},
        });
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]);
        let one = |(name, text): &(&str, &str)| {
            let arguments = [((*name).to_owned(), Value::from(*text))].into_iter().collect();
            let mut call = ToolCall { name: "f".to_owned(), arguments };
            convert(&mut call, &tools);
            call.arguments[*name].clone()
        };
        arguments.iter().map(one).collect()
    }

    #[test]
    fn strings_get_the_types_that_transformers_gives_them() {
        // `_coerce` of transformers 5.24
        for (name, text, expected) in [
            ("i", "7", json!(7)),
            ("i", " +7 ", json!(7)),
            ("i", "-007", json!(-7)),
            ("i", "3.0", json!(3)),
            ("i", "3.5", json!("3.5")),
            ("i", "seven", json!("seven")),
            ("f", "7", json!(7)),
            ("f", "7.0", json!(7.0)),
            ("f", "1e3", json!(1000)),
            ("f", "0.25", json!(0.25)),
            ("f", "inf", json!("inf")),
            ("b", "True", json!(true)),
            ("b", "0", json!(false)),
            ("b", "yes", json!("yes")),
            ("s", "7", json!("7")),
            ("o", "{\"a\": [1]}", json!({"a": [1]})),
            ("o", "[1]", json!("[1]")),
            ("a", "[1, \"x\"]", json!([1, "x"])),
            ("n", "None", json!(null)),
            ("n", "5", json!(5)),
            ("u", "5", json!(5)),
            ("u", "five", json!("five")),
            ("t", "1", json!(true)),
            ("t", "2", json!(2)),
            ("w", "5", json!("5")),
            ("unknown", "5", json!("5")),
        ] {
            assert_eq!(converted(&[(name, text)]), [expected], "{name} {text:?}");
        }
    }
}
