//! Scores by the reward functions and commands of a task for completions that its rows already have: in the column
//! `completion` as a text, and, where functions ask for them, in `completion_ids` as token ids. Rows that follow each
//! other with the same prompt are a group. A line a row on stdout, the seconds that judging took on stderr.
//!
//! `cargo run --release --example judge -- '{"kind": "dataset", "train": "judged.jsonl", "rewards": [{"kind": "python",
//! …}]}'`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example shows what it did")]

use firebrick::engine::data::Prompt;
use firebrick::engine::reward::{Answer, CompletionId, Failure, ProgramResults, Programs};
use firebrick::engine::task::{Split, Task, TaskConfig};
use serde_json::{Map, Value, json};
use std::error::Error;
use std::path::Path;
use std::time::Instant;

/// A row as it was sampled: its prompt, the completion and the completion's tokens.
struct Row {
    prompt: Prompt,
    completion: String,
    tokens: Vec<u32>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let section = std::env::args().nth(1);
    let section = section.ok_or("usage: judge TASK, the section `task` of a configuration as JSON")?;
    let config: TaskConfig = serde_json::from_str(&section)?;
    let task = config.build(Path::new("."))?;
    let rows = rows(task.as_ref())?;
    let programs = Programs::open(task.as_ref())?;
    let started = Instant::now();
    let results = scored(&programs, &rows)?;
    eprintln!("judged in {:.3} s", started.elapsed().as_secs_f64());
    for at in 0..rows.len() {
        println!("{}", line(&programs, &results, at));
    }
    Ok(())
}

fn rows(task: &dyn Task) -> Result<Vec<Row>, Box<dyn Error>> {
    let count = task.len(Split::Train).ok_or("the task has no end")?;
    let row = |index| {
        let example = task.example(Split::Train, index)?;
        let completion = example.fields.get("completion").and_then(Value::as_str);
        let completion = completion.ok_or("a row has no text `completion`")?.to_owned();
        let ids = example.fields.get("completion_ids").cloned();
        let tokens = ids.map(serde_json::from_value).transpose()?;
        let prompt = Prompt { text: String::new(), tokens: Vec::new(), example, row: None };
        Ok(Row { prompt, completion, tokens: tokens.unwrap_or_default() })
    };
    (0..count).map(row).collect()
}

/// Scores all groups at once, as a step that has sampled everything would.
fn scored(programs: &Programs, rows: &[Row]) -> Result<ProgramResults, Box<dyn Error>> {
    let groups = rows.chunk_by(|a, b| a.prompt.example.prompt == b.prompt.example.prompt);
    let answers = groups.enumerate().flat_map(|(prompt_index, group)| {
        group.iter().enumerate().map(move |(sample, row)| Answer {
            prompt: &row.prompt,
            text: row.completion.clone(),
            last_turn: None,
            turns: &[],
            environment: None,
            tokens: &row.tokens,
            finished: true,
            in_thought: false,
            id: CompletionId { step: 0, prompt_index: prompt_index as u64, sample },
        })
    });
    Ok(programs.score(&answers.collect::<Vec<_>>())?)
}

/// The score of a row by each program: a number, null where it does not apply, or why there is none.
fn line(programs: &Programs, results: &ProgramResults, at: usize) -> Value {
    let mut all = Map::new();
    for (name, results) in programs.names().zip(results) {
        let own = match &results[at] {
            Ok(score) => json!({"reward": score.value, "extra": score.extra}),
            Err(Failure::Failed(reason) | Failure::Misused(reason) | Failure::Infinite(reason)) => {
                json!({"error": reason})
            }
        };
        all.insert(name.to_owned(), own);
    }
    Value::Object(all)
}
