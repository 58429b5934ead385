//! Rows become the same prompts wherever they come from, and many rows are not all encoded before the first step.

#[path = "../../../data/src/task/rows/tests/verl_rows.rs"]
mod verl_rows;

use super::*;
use crate::task::{Completion, Reward, TaskConfig, TaskError};
use parquet::basic::Compression;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use verl_rows::write_verl;

const SYSTEM: &str = "Think step by step, then write `#### ` and the answer.";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures")
}

/// GSM8K's rows: questions, and what follows the last `####`.
fn gsm8k() -> Vec<(String, String)> {
    let text = std::fs::read_to_string(fixtures().join("gsm8k/train.jsonl")).expect("rows");
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).expect("JSON");
        let text = |key: &str| row[key].as_str().expect("text").to_owned();
        let answer = text("answer");
        let (_, answer) = answer.rsplit_once("####").expect("an answer");
        (text("question"), answer.trim().replace(',', ""))
    };
    text.lines().map(row).collect()
}

fn dataset(config: &Value, folder: &Path, tokenizer: Tokenizer, most: usize) -> Result<PromptDataset> {
    let config: TaskConfig = serde_json::from_value(config.clone()).expect("a task");
    let task: Arc<dyn Task> = Arc::from(config.build(folder).expect("builds"));
    PromptDataset::new(task, Arc::new(tokenizer), most, None)
}

#[test]
fn gsm8k_as_verls_parquet_and_as_trls_rows_is_the_same() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let rows = gsm8k();
    assert!(rows.len() > 100);
    write_verl(&folder.path().join("train.parquet"), &rows, SYSTEM, Compression::SNAPPY);
    let conversations: Vec<String> = rows
        .iter()
        .map(|(question, answer)| {
            let prompt = json!([
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ]);
            json!({"prompt": prompt, "solution": answer}).to_string()
        })
        .collect();
    std::fs::write(folder.path().join("trl.jsonl"), conversations.join("\n")).expect("written");
    let plain = fixtures().join("gsm8k/train.jsonl");
    let tokenizer = || Tokenizer::from_dir(&fixtures().join("models/llama-rope-llama3")).expect("a tokenizer");
    let of = |config: Value| dataset(&config, folder.path(), tokenizer(), 4096).expect("prompts");
    let rewards = json!([{"kind": "gsm8k"}]);
    let forms = [
        of(json!({"kind": "dataset", "train": "train.parquet", "rewards": rewards})),
        of(json!({"kind": "dataset", "train": "trl.jsonl", "answer_field": "solution", "rewards": rewards})),
        of(json!({
            "kind": "jsonl", "train": plain, "rewards": rewards,
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "{question}"}],
            "answer_field": "answer", "answer_extract": "gsm8k",
        })),
    ];
    for draw in 0..rows.len() as u64 {
        let [verl, trl, own] = forms.each_ref().map(|form| form.draw(7, draw).expect("a prompt"));
        assert_eq!(verl.text, trl.text);
        assert_eq!(verl.text, own.text);
        assert_eq!(verl.tokens, trl.tokens);
        assert_eq!(verl.tokens, own.tokens);
        assert_eq!(verl.example.answer, trl.example.answer);
        assert_eq!(verl.example.answer, own.example.answer);
        assert!(verl.text.contains(SYSTEM));
    }
}

/// A task of so many rows `x…x`, of which every tenth is longer than the others.
fn many(folder: &Path, rows: usize) -> Value {
    let line = |i: usize| {
        let length = if i % 10 == 9 { 30 } else { 5 };
        format!("{{\"prompt\": \"{}\", \"i\": {i}}}", "x".repeat(length))
    };
    let text = (0..rows).map(line).collect::<Vec<_>>().join("\n");
    std::fs::write(folder.join("many.jsonl"), text).expect("written");
    json!({"kind": "dataset", "train": "many.jsonl", "rewards": [{"kind": "length", "max": 3}]})
}

fn characters() -> Tokenizer {
    Tokenizer::characters("x").expect("a tokenizer")
}

#[test]
fn rows_that_are_too_long_are_left_out_when_they_are_drawn() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let config = many(folder.path(), 20_000);
    let data = dataset(&config, folder.path(), characters(), 10).expect("prompts");
    assert_eq!((data.examples(), data.filtered), (Some(20_000), 0));
    assert_eq!(data.longest().expect("a length"), 5);
    let mut drawn = HashSet::new();
    for draw in 0..2000 {
        let prompt = data.draw(3, draw).expect("a prompt");
        assert_eq!(prompt.tokens.len(), 5);
        assert_eq!(prompt.text, data.draw(3, draw).expect("again").text);
        drawn.insert(prompt.example.fields["i"].as_u64());
    }
    // what takes the place of a long row may be drawn again, which is rare
    assert!(drawn.len() > 1900, "{}", drawn.len());
    let text = dataset(&config, folder.path(), characters(), 4).err().expect("refused").to_string();
    assert!(text.contains("all 10000 training prompts") && text.contains("the shortest has 5"), "{text}");
}

#[test]
fn rows_up_to_the_sample_are_all_encoded_and_counted() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let config = many(folder.path(), 1000);
    let data = dataset(&config, folder.path(), characters(), 10).expect("prompts");
    assert_eq!((data.examples(), data.filtered), (Some(900), 100));
}

/// A task of so many rows of five characters, and one of so many more.
fn one_long(folder: &Path, rows: usize, long: usize) -> Value {
    let line = |i: usize| format!("{{\"prompt\": \"{}\"}}", "x".repeat(if i == rows - 1 { long } else { 5 }));
    let text = (0..rows).map(line).collect::<Vec<_>>().join("\n");
    std::fs::write(folder.join("many.jsonl"), text).expect("written");
    json!({"kind": "dataset", "train": "many.jsonl", "rewards": [{"kind": "length", "max": 3}]})
}

#[test]
fn the_longest_row_is_a_bound_however_many_rows_there_are() {
    let folder = tempfile::tempdir().expect("temporary folder");
    for (rows, long, most, bound) in [
        // one that the sample does not have
        (12_000, 400, 450, 400),
        // one that is never drawn
        (12_000, 400, 300, 5),
        // too many to look at all
        (100_001, 9, 450, 450),
    ] {
        let config = one_long(folder.path(), rows, long);
        let data = dataset(&config, folder.path(), characters(), most).expect("prompts");
        assert_eq!(data.longest().expect("a length"), bound, "{rows} rows, one of {long}");
    }
}

/// A task without end whose every 300th prompt is long.
struct Rare {
    declares: bool,
}

impl Task for Rare {
    fn name(&self) -> &'static str {
        "rare"
    }

    fn len(&self, split: Split) -> Option<u64> {
        (split == Split::Validation).then_some(0)
    }

    fn example(&self, _: Split, index: u64) -> std::result::Result<Example, TaskError> {
        Ok(Example::text("x".repeat(if index % 300 == 299 { 30 } else { 5 }), ""))
    }

    fn longest(&self) -> Option<Example> {
        self.declares.then(|| Example::text("x".repeat(30), ""))
    }

    fn reward(&self, _: &Example, _: &Completion<'_>) -> std::result::Result<Reward, TaskError> {
        Ok(Reward::single("none", 0.0))
    }
}

#[test]
fn prompts_of_an_endless_task_are_within_the_bound_whatever_is_drawn_later() {
    for (declares, most, bound) in [(true, 40, 30), (false, 40, 40), (true, 10, 10), (false, 10, 10)] {
        let tokenizer = Arc::new(characters());
        let data = PromptDataset::new(Arc::new(Rare { declares }), tokenizer, most, None).expect("prompts");
        assert_eq!(data.longest().expect("a length"), bound);
        for draw in 290..310 {
            let tokens = data.draw(0, draw).expect("a prompt").tokens.len();
            assert_eq!(tokens, if draw == 299 && most > 30 { 30 } else { 5 }, "draw {draw}");
        }
    }
    let tokenizer = Arc::new(characters());
    let text = PromptDataset::new(Arc::new(Rare { declares: false }), tokenizer, 4, None).err().expect("refused");
    assert!(text.to_string().contains("the shortest has 5"), "{text}");
}

#[test]
fn generated_prompts_are_as_long_as_the_longest_that_their_task_names() {
    let tasks = [
        json!({"kind": "arithmetic"}),
        json!({"kind": "arithmetic", "difficulty": 3, "operations": "+-*"}),
        json!({"kind": "arithmetic", "difficulty": 2, "operations": "-", "zero_pad": true}),
        json!({"kind": "countdown", "style": "short"}),
        json!({"kind": "countdown", "numbers": 6, "style": "short", "max_target": 500}),
        json!({"kind": "countdown", "numbers": 3}),
        json!({"kind": "calculator", "digits": 3, "operations": "+-*"}),
    ];
    for config in tasks {
        let task: TaskConfig = serde_json::from_value(config.clone()).expect("a task");
        let task = task.build(Path::new(".")).expect("builds");
        let longest = task.longest().expect("one");
        let length = |example: &Example| match &example.prompt {
            PromptText::Text(text) => text.len(),
            PromptText::Chat(messages) => messages.iter().map(|message| message.text().len()).sum(),
        };
        let solution = |example: &Example| example.solution.as_ref().map_or(0, String::len);
        let examples: Vec<Example> = (0..2000).map(|at| task.example(Split::Train, at).expect("an example")).collect();
        let max = examples.iter().map(length).max().expect("some");
        assert_eq!(max, length(&longest), "{config}");
        assert!(examples.iter().map(solution).max().expect("some") <= solution(&longest), "{config}");
    }
}
