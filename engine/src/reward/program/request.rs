//! Completions in the format of each kind of program.

use super::super::Answer;
use super::protocol::Protocol;
use crate::task::{Example, Fields, PromptText, Split, Task};
use firebrick_models::tokenizer::Message;
use firebrick_spec::json::to_text;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Rows of a split that are checked before the first step.
const MAX_CHECKED: u64 = 10_000;

/// Message for a completion, with [marks](firebrick_spec::json), or the error that its row lacks a column. `task` is
/// the task's name.
pub(super) fn sample(protocol: &Protocol, task: &str, answer: &Answer<'_>) -> Result<Map<String, Value>, String> {
    let example = &answer.prompt.example;
    let value = match protocol {
        Protocol::Trl { columns, environments, .. } => {
            let (prompt, completion) = conversation(&example.prompt, answer);
            json!({
                "prompt": prompt,
                "completion": completion,
                "completion_ids": answer.tokens,
                "row": select(&example.fields, columns.as_deref()),
                "environment": answer.environment.filter(|_| environments.is_some()),
            })
        }
        Protocol::Verl => json!({
            "data_source": example.fields.column("data_source").unwrap_or(&json!(task)),
            "solution_str": answer.text,
            "ground_truth": ground_truth(example)?,
            "extra_info": extra_info(example.fields.column("extra_info"), answer.turns),
        }),
        Protocol::Lines => {
            let (prompt, _) = conversation(&example.prompt, answer);
            json!({
                "prompt": prompt,
                "completion": answer.text,
                "completion_ids": answer.tokens,
                "finished": answer.finished,
                "answer": example.answer,
                "row": select(&example.fields, None),
            })
        }
    };
    let Value::Object(sample) = value else { unreachable!("all of them are objects") };
    Ok(sample)
}

/// Prompt and completion in the format of the dataset's prompts: two texts, or two lists of messages; of several turns,
/// the completion is the list of all messages.
fn conversation(prompt: &PromptText, answer: &Answer<'_>) -> (Value, Value) {
    match prompt {
        PromptText::Text(text) => (json!(text), json!(answer.text)),
        PromptText::Chat(messages) if !answer.turns.is_empty() => (json!(messages), json!(answer.turns)),
        PromptText::Chat(messages) => (json!(messages), json!([{"role": "assistant", "content": answer.text}])),
    }
}

/// A row's `extra_info` with the additions of verl's reward managers: `num_turns`, which counts the prompt, the model's
/// turns and the messages between them (verl's agent loops), and an empty `rollout_reward_scores`. Values other than
/// objects are unchanged.
fn extra_info(column: Option<&Value>, turns: &[Message]) -> Value {
    let mut fields = match column {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(fields)) => fields.clone(),
        Some(other) => return other.clone(),
    };
    // several tool responses to one turn count as one
    let is_model = |message: &Message| message.role() == "assistant";
    let parts = turns.chunk_by(|a, b| !is_model(a) && !is_model(b)).count();
    fields.insert("num_turns".to_owned(), json!(1 + parts.max(1)));
    fields.insert("rollout_reward_scores".to_owned(), json!({}));
    Value::Object(fields)
}

/// The named columns of a row, or all.
fn select(row: &Fields, columns: Option<&[String]>) -> Map<String, Value> {
    let selected = row.columns().filter(|(name, _)| columns.is_none_or(|names| names.contains(name)));
    selected.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// The ground truth: the row's `reward_model.ground_truth`, text or not, unless the task's answer differs from it.
fn ground_truth(example: &Example) -> Result<Value, String> {
    let in_row = example.fields.column("reward_model");
    let in_row = in_row.and_then(|model| model.get("ground_truth"));
    let is_answer = |value: &&Value| match value {
        _ if example.answer.is_empty() => true,
        Value::String(text) => *text == example.answer,
        other => to_text(other) == example.answer,
    };
    match in_row.filter(is_answer) {
        Some(value) => Ok(value.clone()),
        None if !example.answer.is_empty() => Ok(json!(example.answer)),
        None => Err(
            "it compares with a ground truth, but the row has no `reward_model.ground_truth`; set `task.answer_field` or \
             `task.answer`"
                .to_owned(),
        ),
    }
}

/// Rejects a task whose rows lack a required column: the first rows of each split are checked.
pub(super) fn check_rows(protocol: &Protocol, task: &dyn Task) -> Result<(), String> {
    for split in [Split::Train, Split::Validation] {
        let number = task.len(split).map_or(1, |len| len.min(MAX_CHECKED));
        let examples = (0..number).map(|i| task.example(split, i).map(|example| (i, example)));
        match protocol {
            Protocol::Lines => {}
            Protocol::Verl => {
                for example in examples {
                    let (i, example) = example.map_err(|e| e.to_string())?;
                    ground_truth(&example).map_err(|e| format!("{} example {i}: {e}", split.name()))?;
                }
            }
            Protocol::Trl { needs, .. } if needs.is_empty() || number == 0 => {}
            Protocol::Trl { needs, .. } => {
                let mut columns = BTreeSet::new();
                for example in examples {
                    let (_, example) = example.map_err(|e| e.to_string())?;
                    columns.extend(example.fields.keys().cloned());
                }
                if let Some(name) = needs.iter().find(|name| !columns.contains(*name)) {
                    let columns: Vec<String> = columns.iter().map(|c| format!("`{c}`")).collect();
                    return Err(format!(
                        "it needs `{name}`, which is not a column of the {} rows; they have {}",
                        split.name(),
                        columns.join(", ")
                    ));
                }
            }
        }
    }
    Ok(())
}
