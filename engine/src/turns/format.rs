//! Format of tool calls: the one that the chat template writes, or the configured one.

use crate::task::ToolParser;
use crate::{Error, Result};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::{Value, json};

/// Name of the tool with which templates are tested.
const TOOL: &str = "name_of_a_tool";

/// Format of a model's tool calls: `configured`, or the one in which the chat template writes a call after the first
/// messages of a conversation; Hermes for a template without calls.
///
/// # Errors
/// [`Error::Config`] if none is configured and the template writes calls in an unknown format.
pub fn tool_format(
    tokenizer: &Tokenizer,
    tools: &Value,
    prompt: &[Message],
    configured: Option<ToolParser>,
) -> Result<ToolParser> {
    let calls = template_calls(tokenizer, tools, prompt);
    let detected = calls.iter().find_map(|call| ToolParser::of_call(call, TOOL));
    match (configured, detected, calls.first()) {
        (Some(configured), Some(detected), _) if configured != detected => {
            tracing::warn!(
                "rollout.multi_turn.format: tool calls are read as {}, and the chat template writes them as {}: other calls \
                 have no effect. Remove the key for the template's format",
                configured.name(),
                detected.name()
            );
            Ok(configured)
        }
        (Some(format), ..) | (None, Some(format), _) => Ok(format),
        (None, None, None) => Ok(ToolParser::Hermes),
        (None, None, Some(call)) => {
            let guess = ToolParser::other(call).map(|name| format!(" (it seems to be vLLM's `{name}`)"));
            Err(Error::Config(format!(
                "rollout.multi_turn.format: the chat template writes a tool call as {call:?}{}, which is none of the formats \
                 that can be read: {}; set the key to the one that the model is to write, or model.chat_template to a file \
                 that writes one of these",
                guess.unwrap_or_default(),
                ToolParser::names()
            )))
        }
    }
}

/// The template's text of a tool call, for each form of message that it accepts: arguments as an object or as its JSON,
/// with empty content or none.
fn template_calls(tokenizer: &Tokenizer, tools: &Value, prompt: &[Message]) -> Vec<String> {
    let render = |messages: &[Message], add_generation_prompt| {
        let options = ChatOptions { add_generation_prompt, tools: Some(tools), ..ChatOptions::default() };
        tokenizer.render_chat_with(messages, options).ok()
    };
    let Some(before) = render(prompt, true) else { return Vec::new() };
    let arguments = [json!({"x": 1}), json!("{\"x\": 1}")];
    let forms = arguments.iter().flat_map(|arguments| [(arguments, json!("")), (arguments, Value::Null)]);
    let calls = forms.filter_map(|(arguments, content)| {
        let function = json!({"name": TOOL, "arguments": arguments});
        let calls = json!([{"id": "call00001", "type": "function", "function": function}]);
        let turn = Message::new("assistant", "").with_content(content).with("tool_calls", calls);
        let text = render(&[prompt, &[turn]].concat(), false)?;
        let call = text[common(&text, &before)..].to_owned();
        call.contains(TOOL).then(|| without_end(&call, tokenizer).to_owned())
    });
    calls.collect()
}

/// Length of the common prefix of two texts, without the beginning of a tag.
fn common(text: &str, other: &str) -> usize {
    let pairs = text.chars().zip(other.chars());
    let length = pairs.take_while(|(x, y)| x == y).map(|(x, _)| x.len_utf8()).sum();
    text[..length].trim_end_matches('<').len()
}

/// A text without special tokens at its end.
fn without_end<'t>(text: &'t str, tokenizer: &Tokenizer) -> &'t str {
    let text = text.trim_end();
    let mut ends = tokenizer.special_tokens().values().filter_map(|token| text.strip_suffix(token.as_str()));
    ends.next().map_or(text, |rest| without_end(rest, tokenizer))
}
