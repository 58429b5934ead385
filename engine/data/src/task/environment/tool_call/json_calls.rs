//! Calls as JSON objects with a name and arguments: Hermes, and Llama 3.

use super::{ToolCall, ToolCalls};
use firebrick_spec::json::{parse, to_text};
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

/// Tags around a call of Hermes.
pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

/// Optional prefix of a call of Llama 3.
const PYTHON_TAG: &str = "<|python_tag|>";

/// The text in each pair of tags. As in vLLM, the last one needs no closing tag.
pub(super) fn tagged<'t>(text: &'t str, open: &str, close: &str) -> Vec<&'t str> {
    let mut texts = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(open) {
        let (inside, behind) = after.split_once(close).unwrap_or((after, ""));
        texts.push(inside);
        rest = behind;
    }
    texts
}

pub(super) fn hermes(text: &str) -> ToolCalls {
    let read = |inside: &&str| value(inside.trim()).and_then(call);
    tagged(text, OPEN, CLOSE).iter().map(read).collect()
}

pub(super) fn llama3(text: &str) -> ToolCalls {
    let text = text.trim();
    let (has_tag, text) = match text.strip_prefix(PYTHON_TAG) {
        Some(text) => (true, text.trim_start()),
        None => (false, text),
    };
    if !has_tag && !text.starts_with('{') {
        return Vec::new();
    }
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<IgnoredAny>();
        let length = match values.next() {
            Some(Ok(_)) => values.byte_offset(),
            _ => rest.len(),
        };
        let json = value(&rest[..length]);
        // an answer in JSON is no call of a tool
        if calls.is_empty() && !has_tag && json.as_ref().is_ok_and(|json| json.get("name").is_none()) {
            return Vec::new();
        }
        calls.push(json.and_then(call));
        rest = rest[length..].trim_start();
        rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
    }
    calls
}

/// The value of a call's JSON.
fn value(text: &str) -> Result<Value, String> {
    parse(text.as_bytes()).map_err(|fault| format!("the tool call is not JSON: {fault}"))
}

/// A call from its JSON.
fn call(value: Value) -> Result<ToolCall, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("the tool call is {}; expected an object", to_text(&value)));
    };
    let Some(Value::String(name)) = fields.remove("name") else {
        return Err("the tool call has no `name`".to_owned());
    };
    let arguments = fields.remove("arguments").or_else(|| fields.remove("parameters"));
    with_arguments(name, arguments.unwrap_or_default())
}

/// A call with its arguments' JSON.
pub(super) fn with_text(name: &str, arguments: &str) -> Result<ToolCall, String> {
    let arguments = arguments.trim();
    let arguments = if arguments.is_empty() { Value::Null } else { value(arguments)? };
    with_arguments(name.to_owned(), arguments)
}

/// A call with its arguments: an object, the JSON of one, as `OpenAI`'s format has them, or null for none.
fn with_arguments(name: String, arguments: Value) -> Result<ToolCall, String> {
    let arguments = match arguments {
        Value::String(json) => parse(json.as_bytes()).unwrap_or(Value::String(json)),
        other => other,
    };
    match arguments {
        Value::Object(arguments) => Ok(ToolCall { name, arguments }),
        Value::Null => Ok(ToolCall { name, arguments: Map::new() }),
        other => Err(format!("the arguments of `{name}` are {}; expected an object", to_text(&other))),
    }
}
