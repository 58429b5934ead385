//! `NeMo RL`'s `data` and `env`: rows, prompts, and what grades completions.

use super::policy::prompt_length;
use crate::facts::Facts;
use crate::rules::prelude::*;
use serde_json::json;

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: ground_truth length prompt question system_prompt;
};

/// A setting of the training rows, or else of all rows.
fn row_setting<'a>(facts: &'a Facts, name: &str) -> Option<&'a str> {
    ["data.train", "data.default", "data"].iter().find_map(|section| facts.text(&format!("{section}.{name}")))
}

fn length(source: &SourceKey) -> MappedKey {
    match (source.whole().filter(|n| *n > 0), prompt_length(source.facts)) {
        (Some(length), Some(prompt)) if length == prompt => set("rollout.prompt_length", prompt),
        (Some(_), _) => not_needed("no less than max_total_sequence_length, which has the lengths of both"),
        _ => source.off_or_wrong("a number of tokens"),
    }
}

/// The prompt of a row: its question, within the text of a prompt file. Braces there are those of a template here.
fn messages(facts: &Facts) -> Result<MappedKey, String> {
    let field = row_setting(facts, "input_key").unwrap_or("input");
    let content = match row_setting(facts, "prompt_file") {
        Some(file) => {
            let text = std::fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))?;
            let content = with_question(&text, field);
            content.ok_or_else(|| format!("{file}: expected one {{}}, in place of the question"))?
        }
        None => format!("{{{field}}}"),
    };
    Ok(set("task.messages", json!([{"role": "user", "content": content}])))
}

/// A text of Python's `format` with a field in its only placeholder; doubled braces are literal braces in both.
fn with_question(text: &str, field: &str) -> Option<String> {
    let (mut message, mut rest, mut placeholders) = (String::new(), text, 0);
    while let Some(at) = rest.find(['{', '}']) {
        let (before, brace) = rest.split_at(at);
        message.push_str(before);
        let pair = brace.get(..2)?;
        match pair {
            "{{" | "}}" => message.push_str(pair),
            "{}" => {
                placeholders += 1;
                message.extend(["{", field, "}"]);
            }
            _ => return None,
        }
        rest = &brace[2..];
    }
    message.push_str(rest);
    (placeholders == 1).then_some(message)
}

fn prompt(source: &SourceKey) -> MappedKey {
    messages(source.facts).unwrap_or_else(|why| cannot(format!("{why}; write the prompt as task.messages")))
}

fn question(source: &SourceKey) -> MappedKey {
    match source.text() {
        Some(_) => messages(source.facts).unwrap_or_else(|_| not_needed("the field is in the prompt of prompt_file")),
        None => source.off_or_wrong("the name of a field"),
    }
}

fn system_prompt(source: &SourceKey) -> MappedKey {
    let Some(file) = row_setting(source.facts, "system_prompt_file") else {
        return not_needed("none, as here by default");
    };
    match std::fs::read_to_string(file) {
        Ok(text) => set("task.system_prompt", text),
        Err(e) => cannot(format!("cannot read {}: {e}; write its text as task.system_prompt", source.facts.path(file))),
    }
}

fn ground_truth(source: &SourceKey) -> MappedKey {
    match row_setting(source.facts, "output_key") {
        Some(field) => set("task.answer_field", field),
        None => source.off_or_wrong("the name of a field"),
    }
}
