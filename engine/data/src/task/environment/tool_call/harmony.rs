//! Calls of gpt-oss: a turn is one or several messages of Harmony, a message to a recipient is a call.
//!
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
//! <|constrain|>json<|message|>{…}<|call|>`. Chat templates write the recipient before the channel.

use super::ToolCalls;
use super::json_calls::with_text;

const START: &str = "<|start|>";
const MESSAGE: &str = "<|message|>";
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

/// The namespace of a conversation's tools.
const FUNCTIONS: &str = "functions.";

pub(super) fn read(text: &str) -> ToolCalls {
    let messages = text.split(START).filter_map(|message| message.split_once(MESSAGE));
    messages
        .filter_map(|(header, body)| {
            let name = recipient(header)?;
            let end = ENDS.iter().filter_map(|end| body.find(end)).min().unwrap_or(body.len());
            Some(with_text(name, &body[..end]))
        })
        .collect()
}

/// The tool that the header of a message addresses.
fn recipient(header: &str) -> Option<&str> {
    let (_, recipient) = header.split_once("to=")?;
    let end = recipient.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(recipient.len());
    let name = &recipient[..end];
    Some(name.strip_prefix(FUNCTIONS).unwrap_or(name))
}
