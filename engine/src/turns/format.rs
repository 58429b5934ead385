//! The format of tool calls: the one that the chat template writes, or the one that is set.

use crate::task::ToolParser;
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::{Value, json};

/// The tool that a template is tried with.
const TOOL: &str = "name_of_a_tool";

/// The format in which a model is to call tools: `wanted`, or the one in which the chat template writes a call after a
/// conversation's first messages; Hermes with a template that writes none.
///
/// # Errors
/// [`Error::Config`] where none is wanted and the template writes calls in a format that is not read.
pub fn tool_format(
    tokenizer: &Tokenizer,
    tools: &Value,
    prompt: &[Message],
    wanted: Option<ToolParser>,
) -> Result<ToolParser> {
    let calls = written_calls(tokenizer, tools, prompt);
    let found = calls.iter().find_map(|call| ToolParser::of_call(call, TOOL));
    match (wanted, found, calls.first()) {
        (Some(wanted), Some(found), _) if wanted != found => {
            tracing::warn!(
                "rollout.multi_turn.format: tool calls are read as {}, and the chat template writes them as {}: other calls \
                 have no effect. Remove the key for the template's format",
                wanted.name(),
                found.name()
            );
            Ok(wanted)
        }
        (Some(format), ..) | (None, Some(format), _) => Ok(format),
        (None, None, None) => Ok(ToolParser::Hermes),
        (None, None, Some(call)) => {
            let seems = ToolParser::other(call).map(|name| format!(" (it seems to be vLLM's `{name}`)"));
            Err(Error::Config(format!(
                "rollout.multi_turn.format: the chat template writes a tool call as {call:?}{}, which is none of the formats \
                 that can be read: {}; set the key to the one that the model is to write, or model.chat_template to a file \
                 that writes one of these",
                seems.unwrap_or_default(),
                ToolParser::names()
            )))
        }
    }
}

/// What the template writes of a call in the fields of a message, for each form of these that it takes: arguments as an
/// object or as its JSON, with an empty content or none.
fn written_calls(tokenizer: &Tokenizer, tools: &Value, prompt: &[Message]) -> Vec<String> {
    let render = |messages: &[Message], add_generation_prompt| {
        let options = ChatOptions { add_generation_prompt, tools: Some(tools), ..ChatOptions::default() };
        tokenizer.render_chat_with(messages, options).ok()
    };
    let Some(before) = render(prompt, true) else { return Vec::new() };
    let arguments = [json!({"x": 1}), json!("{\"x\": 1}")];
    let forms = arguments.iter().flat_map(|own| [(own, json!("")), (own, Value::Null)]);
    let written = forms.filter_map(|(arguments, content)| {
        let function = json!({"name": TOOL, "arguments": arguments});
        let calls = json!([{"id": "call00001", "type": "function", "function": function}]);
        let turn = Message::new("assistant", "").with_content(content).with("tool_calls", calls);
        let text = render(&[prompt, &[turn]].concat(), false)?;
        let call = text[common(&text, &before)..].to_owned();
        call.contains(TOOL).then(|| without_end(&call, tokenizer).to_owned())
    });
    written.collect()
}

/// Length of what two texts begin with, without the beginning of a tag.
fn common(text: &str, other: &str) -> usize {
    let pairs = text.chars().zip(other.chars());
    let length = pairs.take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum();
    text[..length].trim_end_matches('<').len()
}

/// A text without the special tokens that it ends with.
fn without_end<'t>(text: &'t str, tokenizer: &Tokenizer) -> &'t str {
    let text = text.trim_end();
    let mut ends = tokenizer.special_tokens().values().filter_map(|token| text.strip_suffix(token.as_str()));
    ends.next().map_or(text, |rest| without_end(rest, tokenizer))
}
