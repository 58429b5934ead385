//! Tool calls in the formats that models write.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Format in which a model writes tool calls, under vLLM's names of their parsers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolParser {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Qwen and others).
    #[default]
    Hermes,
    /// `{"name": …, "parameters": {…}}` as the turn, several separated by `;` (Llama 3.1 and later).
    #[serde(rename = "llama3_json")]
    Llama3Json,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    /// The tool.
    pub name: String,
    /// Its arguments by name.
    pub arguments: Map<String, Value>,
}

/// The calls of a turn in order; of what cannot be read as a call, the reason.
pub type ToolCalls = Vec<Result<ToolCall, String>>;

/// What stands around a call of Hermes.
const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
/// What may stand before a call of Llama 3.
const PYTHON_TAG: &str = "<|python_tag|>";

impl ToolParser {
    /// The calls in a turn's text.
    #[must_use]
    pub fn parse(self, text: &str) -> ToolCalls {
        match self {
            Self::Hermes => hermes(text),
            Self::Llama3Json => llama3(text),
        }
    }

    /// A call as a model would write it.
    #[must_use]
    pub fn example(self) -> &'static str {
        match self {
            Self::Hermes => "<tool_call>\n{\"name\": \"tool\", \"arguments\": {\"x\": 1}}\n</tool_call>",
            Self::Llama3Json => "{\"name\": \"tool\", \"parameters\": {\"x\": 1}}",
        }
    }
}

fn hermes(text: &str) -> ToolCalls {
    let mut calls = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once(OPEN) {
        // as vLLM, a call that the turn ends in needs no closing tag
        let (inside, behind) = after.split_once(CLOSE).unwrap_or((after, ""));
        calls.push(match serde_json::from_str(inside.trim()) {
            Ok(value) => call(value),
            Err(error) => Err(format!("the tool call is not JSON: {error}")),
        });
        rest = behind;
    }
    calls
}

fn llama3(text: &str) -> ToolCalls {
    let text = text.trim();
    let (tagged, text) = match text.strip_prefix(PYTHON_TAG) {
        Some(text) => (true, text.trim_start()),
        None => (false, text),
    };
    if !tagged && !text.starts_with('{') {
        return Vec::new();
    }
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => {
                // an answer in JSON is no call of a tool
                if calls.is_empty() && !tagged && value.get("name").is_none() {
                    return Vec::new();
                }
                calls.push(call(value));
                rest = rest[values.byte_offset()..].trim_start();
                rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
            }
            Some(Err(error)) => {
                calls.push(Err(format!("the tool call is not JSON: {error}")));
                break;
            }
            None => break,
        }
    }
    calls
}

/// A call from its JSON. Arguments that are the JSON of an object, as `OpenAI`'s format has them, are read too.
fn call(value: Value) -> Result<ToolCall, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("the tool call is {value}; expected an object"));
    };
    let Some(Value::String(name)) = fields.remove("name") else {
        return Err("the tool call has no `name`".to_owned());
    };
    let arguments = fields.remove("arguments").or_else(|| fields.remove("parameters"));
    let arguments = match arguments {
        Some(Value::String(json)) => serde_json::from_str(&json).unwrap_or(Value::String(json)),
        Some(arguments) => arguments,
        None => Value::Object(Map::new()),
    };
    match arguments {
        Value::Object(arguments) => Ok(ToolCall { name, arguments }),
        Value::Null => Ok(ToolCall { name, arguments: Map::new() }),
        other => Err(format!("the arguments of `{name}` are {other}; expected an object")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(parser: ToolParser, text: &str) -> Vec<Value> {
        let calls = parser.parse(text).into_iter();
        calls.map(|call| call.map_or_else(Value::String, |call| json!([call.name, call.arguments]))).collect()
    }

    #[test]
    fn calls_of_hermes_are_read_wherever_they_stand() {
        let of = |text| read(ToolParser::Hermes, text);
        assert_eq!(of("no call, {\"name\": 1}"), Vec::<Value>::new());
        assert_eq!(
            of("Let me see.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [2]}}\n</tool_call>"),
            vec![json!(["add", {"a": 1, "b": [2]}])]
        );
        assert_eq!(
            of(
                "<tool_call>{\"name\": \"a\"}</tool_call> and <tool_call>{\"arguments\": \"{\\\"x\\\": 1}\", \"name\": \"b\"}"
            ),
            vec![json!(["a", {}]), json!(["b", {"x": 1}])]
        );
    }

    #[test]
    fn calls_of_llama_are_the_turn() {
        let of = |text| read(ToolParser::Llama3Json, text);
        let one = json!(["add", {"a": 1}]);
        assert_eq!(of(" {\"name\": \"add\", \"parameters\": {\"a\": 1}}"), vec![one.clone()]);
        assert_eq!(
            of("<|python_tag|>{\"name\": \"add\", \"parameters\": {\"a\": 1}}; {\"name\": \"f\", \"arguments\": null}"),
            vec![one, json!(["f", {}])]
        );
        for none in ["The sum {\"name\": \"add\"}", "{\"answer\": 3}", "", "[1, 2]"] {
            assert_eq!(of(none), Vec::<Value>::new(), "{none:?}");
        }
    }

    #[test]
    fn what_is_no_call_says_why() {
        for (parser, text, reason) in [
            (ToolParser::Hermes, "<tool_call>add(1)</tool_call>", "is not JSON"),
            (ToolParser::Hermes, "<tool_call>[1]</tool_call>", "is [1]"),
            (ToolParser::Hermes, "<tool_call>{}</tool_call>", "no `name`"),
            (
                ToolParser::Hermes,
                "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
                "arguments of `f` are 3",
            ),
            (ToolParser::Llama3Json, "{\"name\": \"add\"", "is not JSON"),
            (ToolParser::Llama3Json, "<|python_tag|>print(1)", "is not JSON"),
        ] {
            let calls = parser.parse(text);
            assert_eq!(calls.len(), 1, "{text}");
            let found = calls[0].as_ref().expect_err(text);
            assert!(found.contains(reason), "{text}: {found}");
        }
    }

    #[test]
    fn a_parsers_own_example_is_a_call() {
        for parser in [ToolParser::Hermes, ToolParser::Llama3Json] {
            assert_eq!(read(parser, parser.example()), vec![json!(["tool", {"x": 1}])]);
        }
    }
}
