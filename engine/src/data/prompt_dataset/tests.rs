//! Rows become the same prompts wherever they come from, and many rows are not all encoded before the first step.

use super::*;
use crate::task::rows::tests::write_verl;
use crate::task::{Arithmetic, ArithmeticConfig, TaskConfig};
use parquet::basic::Compression;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

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
    let glance = data.glance().count() as u64;
    assert!((SAMPLED_ROWS * 8 / 10..=SAMPLED_ROWS).contains(&glance), "{glance}");
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

#[test]
fn an_endless_task_is_glanced_at() {
    let task = Arithmetic::new(&ArithmeticConfig::default()).expect("a task");
    let tokenizer = Tokenizer::characters(task.alphabet().expect("one")).expect("a tokenizer");
    let data = PromptDataset::new(Arc::new(task), Arc::new(tokenizer), 16, None).expect("prompts");
    assert_eq!(data.examples(), None);
    assert_eq!(data.glance().count() as u64, GLANCE);
    assert!(data.longest().expect("a length") >= 4);
}
