//! Calls of Qwen 3.5 and Qwen 3 Coder: a tag for the function, and one for each argument, whose values are text.

use super::json_calls::{CLOSE, OPEN, tagged};
use super::{ToolCall, ToolCalls};
use serde_json::{Map, Value};

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END_OF_PARAMETER: &str = "</parameter>";

pub(super) fn read(text: &str) -> ToolCalls {
    let mut calls = Vec::new();
    for inside in tagged(text, OPEN, CLOSE) {
        let functions = tagged(inside, FUNCTION, "</function>");
        if functions.is_empty() {
            calls.push(Err("the tool call has no `<function=NAME>`".to_owned()));
        }
        calls.extend(functions.into_iter().map(call));
    }
    calls
}

/// A call from what is behind `<function=`.
fn call(text: &str) -> Result<ToolCall, String> {
    let (name, mut rest) = name(text).ok_or("the tool call has no `>` behind the name of its function")?;
    let mut arguments = Map::new();
    while let Some((_, after)) = rest.split_once(PARAMETER) {
        let Some((key, value)) = self::name(after) else {
            return Err(format!("a parameter of the tool call of `{name}` has no `>` behind its name"));
        };
        let Some((value, behind)) = value.split_once(END_OF_PARAMETER) else {
            return Err(format!("the parameter `{key}` of the tool call of `{name}` has no `{END_OF_PARAMETER}`"));
        };
        // the line breaks next to the tags are the format's
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), Value::from(value));
        rest = behind;
    }
    Ok(ToolCall { name: name.to_owned(), arguments })
}

/// The name that a tag ends with, and what is behind the tag.
fn name(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once('>')?;
    (!name.contains('\n')).then(|| (name.trim(), rest))
}
