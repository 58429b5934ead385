//! Calls of DeepSeek's models between special tokens: with a kind and a block of JSON in R1 and V3, and without in
//! V3.1.

use super::ToolCalls;
use super::json_calls::{tagged, with_text};

const SEPARATOR: &str = "<｜tool▁sep｜>";
const BLOCK: &str = "\n```json";

pub(super) fn read(text: &str) -> ToolCalls {
    let calls = tagged(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>");
    calls
        .into_iter()
        .map(|inside| {
            let Some((first, rest)) = inside.split_once(SEPARATOR) else {
                return Err(format!("the tool call has no `{SEPARATOR}`"));
            };
            match rest.split_once(BLOCK) {
                Some((name, arguments)) => {
                    let arguments = arguments.trim_end();
                    with_text(name.trim(), arguments.strip_suffix("```").unwrap_or(arguments))
                }
                None => with_text(first.trim(), rest),
            }
        })
        .collect()
}
