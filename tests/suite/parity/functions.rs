//! Reward functions in Python beside TRL and verl: the files in `tests/fixtures/rewards/functions`, and what both
//! engines said of 500 completions (`tests/campaigns/run reward_parity --record`). Where there is no Python, this says
//! so.

use firebrick_engine::data::Prompt;
use firebrick_engine::reward::{Answer, CompletionId, Programs};
use firebrick_engine::task::{Split, Task, TaskConfig};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use crate::support::{checked, fixtures, is_foreign, report};

/// A row, and what an engine said of it by the functions of its file.
struct Recorded {
    row: Value,
    trl: Value,
    verl: Value,
}

/// None, said aloud, where this machine has no Python or the fixtures are others.
fn recorded() -> Option<Vec<Recorded>> {
    if Command::new("python3").arg("--version").output().is_err() {
        report("skipped: there is no python3 on this machine");
        return None;
    }
    let file = fixtures().join("rewards/function_scores.jsonl");
    if is_foreign() && !file.is_file() {
        report("no rewards/function_scores.jsonl in FIREBRICK_FIXTURES: none checked");
        return None;
    }
    let text = std::fs::read_to_string(file).expect("function_scores.jsonl");
    let recorded = text.lines().map(|line| {
        let mut line: Value = serde_json::from_str(line).expect("JSON");
        let mut part = |name: &str| line[name].take();
        Recorded { row: part("row"), trl: part("trl"), verl: part("verl") }
    });
    Some(recorded.collect())
}

/// A task of these rows, judged by functions of a file with their arguments.
fn task(folder: &Path, rows: impl Iterator<Item = Value>, file: &str, functions: &[(&str, Value)]) -> Box<dyn Task> {
    let mut text = String::new();
    for row in rows {
        writeln!(text, "{row}").expect("a text");
    }
    let train = folder.join("rows.jsonl");
    std::fs::write(&train, text).expect("written");
    let file = fixtures().join("rewards/functions").join(file);
    let reward = |(name, kwargs): &(&str, Value)| json!({"kind": "python", "name": name, "function": name, "file": file, "kwargs": kwargs});
    let rewards: Vec<Value> = functions.iter().map(reward).collect();
    let config = json!({"kind": "dataset", "train": train, "rewards": rewards});
    let config: TaskConfig = serde_json::from_value(config).expect("a task");
    config.build(folder).expect("built")
}

/// What the functions say of the rows' completions: reward and extra by name, one map a row.
fn said(task: &dyn Task) -> Vec<Map<String, Value>> {
    let programs = Programs::open(task).expect("started");
    let count = task.len(Split::Train).expect("rows");
    let prompts: Vec<Prompt> = (0..count)
        .map(|index| Prompt {
            example: task.example(Split::Train, index).expect("an example"),
            text: String::new(),
            tokens: Vec::new(),
            row: None,
        })
        .collect();
    let tokens = |prompt: &Prompt| -> Vec<u32> {
        serde_json::from_value(prompt.example.fields["completion_ids"].clone()).expect("ids")
    };
    let tokens: Vec<Vec<u32>> = prompts.iter().map(tokens).collect();
    let answer = |at: usize| Answer {
        prompt: &prompts[at],
        text: prompts[at].example.fields["completion"].as_str().expect("a text").to_owned(),
        last_turn: None,
        turns: &[],
        environment: None,
        tokens: &tokens[at],
        finished: true,
        in_thought: false,
        id: CompletionId::default(),
    };
    let answers: Vec<Answer<'_>> = (0..prompts.len()).map(answer).collect();
    let mut results = vec![Vec::new(); programs.names().count()];
    for group in answers.chunk_by(|a, b| a.prompt.example.prompt == b.prompt.example.prompt) {
        for (results, own) in results.iter_mut().zip(programs.score(group).expect("scored")) {
            results.extend(own);
        }
    }
    (0..answers.len())
        .map(|at| {
            let own = programs.names().zip(&results).map(|(name, results)| {
                let score = results[at].as_ref().unwrap_or_else(|e| panic!("{e}"));
                let own = json!({"reward": score.value, "extra": score.extra});
                (name.to_owned(), own)
            });
            own.collect()
        })
        .collect()
}

#[test]
fn functions_for_trl_give_the_rewards_that_trl_takes_from_them() {
    let Some(recorded) = recorded() else { return };
    let functions = ["right", "form", "near", "length", "first_letter"].map(|f| (f, json!({})));
    let folder = tempfile::tempdir().expect("a folder");
    let mut compared = 0;
    for is_chat in [false, true] {
        let row = |own: &Recorded| {
            let mut row = own.row.clone();
            if is_chat {
                row["prompt"] = json!([{"role": "user", "content": row["prompt"]}]);
            }
            row
        };
        let rows = recorded.iter().map(row);
        let task = task(folder.path(), rows, "for_trl.py", &functions);
        for (own, found) in recorded.iter().zip(said(task.as_ref())) {
            for (name, found) in found {
                // TRL keeps rewards as 32-bit floats
                let bits = |value: &Value| value.as_f64().map(|reward| (reward as f32).to_bits());
                let wanted = &own.trl[&name];
                assert_eq!(
                    bits(&found["reward"]),
                    bits(&wanted["reward"]),
                    "{name}: {found} instead of {wanted} of {}",
                    own.row
                );
                if name == "length" {
                    let logged = |said: &Value| numeric(&said["extra"]["tokens"]);
                    assert_eq!(logged(&found), logged(wanted), "{}", own.row);
                }
                compared += 1;
            }
        }
    }
    checked("rewards by functions for TRL", compared);
}

#[test]
fn functions_for_verl_give_the_rewards_that_verl_takes_from_them() {
    let Some(recorded) = recorded() else { return };
    let functions = [
        ("compute_score", json!({"partial": 0.1})),
        ("near", json!({})),
        ("strict", json!({})),
        ("detailed", json!({})),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    let rows = recorded.iter().map(|own| own.row.clone());
    let task = task(folder.path(), rows, "for_verl.py", &functions);
    let mut compared = 0;
    for (own, found) in recorded.iter().zip(said(task.as_ref())) {
        for (name, found) in found {
            let wanted = &own.verl[&name];
            let bits = |value: &Value| value.as_f64().map(f64::to_bits);
            assert_eq!(
                bits(&found["reward"]),
                bits(&wanted["reward"]),
                "{name}: {found} instead of {wanted} of {}",
                own.row
            );
            // verl counts a plain number under `acc`
            if name == "compute_score" || name == "detailed" {
                for (key, wanted) in wanted["extra"].as_object().expect("an object") {
                    let (found, wanted) = (numeric(&found["extra"][key]), numeric(wanted));
                    assert_eq!(found, wanted, "{name}: {key}");
                }
            }
            compared += 1;
        }
    }
    checked("rewards by functions for verl", compared);
}

/// Whole numbers and reals alike.
fn numeric(value: &Value) -> Value {
    value.as_f64().map_or_else(|| value.clone(), Value::from)
}
