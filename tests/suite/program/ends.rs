//! What ends a completion: the tokens that checkpoint, tokenizer and chat template name, and stop strings.

use super::{Bench, copy_model, program, succeeded};
use crate::support::{fixtures, read};
use serde_json::{Value, json};
use std::process::Output;

/// The end of a text and of a turn in the fixture's vocabulary.
const TEXT: u64 = 509;
const TURN: u64 = 511;

/// A copy of a model of the Qwen kind whose checkpoint and tokenizer end texts with these tokens.
fn model(bench: &Bench, generation: &Value, tokenizer: &str) {
    let to = bench.path("model");
    copy_model("qwen2-tied", &to);
    for (file, key, value) in [
        ("config.json", "eos_token_id", generation.clone()),
        ("generation_config.json", "eos_token_id", generation.clone()),
        ("tokenizer_config.json", "eos_token", json!(tokenizer)),
        ("special_tokens_map.json", "eos_token", json!(tokenizer)),
    ] {
        let path = to.join(file);
        let mut own: Value = read(&path);
        own[key] = value;
        std::fs::write(path, own.to_string()).unwrap();
    }
}

/// A file with one conversation, and a configuration that trains on it for a step.
fn one_chat(bench: &Bench) {
    let turn = |role: &str, text: &str| json!({"role": role, "content": text});
    let row = json!({"messages": [turn("user", "say cat"), turn("assistant", "cat")]});
    bench.write("rows.jsonl", &row.to_string());
    bench.write(
        "config.yaml",
        &format!(
            "model: {{path: model}}\noutput: {}\ndevice: cpu\nsft: {{train: rows.jsonl, steps: 1, batch_size: 1}}\n",
            bench.path("run").display()
        ),
    );
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
}

#[test]
fn the_end_of_the_template_s_turns_ends_completions_of_a_base_model_and_of_what_is_saved() {
    for (generation, tokenizer, ids, told) in [
        (json!(TEXT), "<|endoftext|>", json!([TEXT, TURN]), true),
        (json!([TEXT]), "<|im_end|>", json!([TEXT, TURN]), true),
        (json!(TURN), "<|endoftext|>", json!([TURN, TEXT]), true),
        (json!([TURN, TEXT]), "<|im_end|>", json!([TURN, TEXT]), false),
    ] {
        let bench = Bench::new();
        model(&bench, &generation, tokenizer);
        one_chat(&bench);
        let trained = bench.firebrick("sft", &[]);
        succeeded(&trained);
        let saved = bench.path("run/checkpoints/step-000001/model");
        let config: Value = read(&saved.join("generation_config.json"));
        assert_eq!(config["eos_token_id"], ids);
        let path = bench.path("config.yaml");
        let check = program(&["config", "check", path.to_str().unwrap()]).current_dir(bench.path("")).output().unwrap();
        succeeded(&check);
        for output in [&trained, &check] {
            let lines = said(output).matches("completions end with").count();
            assert_eq!(lines, usize::from(told), "{}", said(output));
        }
    }
}

#[test]
fn rewards_and_samples_have_the_text_before_a_stop_string() {
    let bench = Bench::new();
    let row = json!({"question": "ab", "answer": "cd"}).to_string();
    bench.write("rows.jsonl", &row);
    bench.write("rewards.py", "def short(completions, **_):\n    return [float(len(c)) for c in completions]\n");
    // half of the vocabulary's letters and a special token: most completions end with one of these
    let stop = json!(["e", "a", "i", "o", "n", "r", "t", "s", "<|im_end|>"]);
    bench.write(
        "config.yaml",
        &format!(
            "model: {{path: {}}}\noutput: {}\ndevice: cpu\n\
             task: {{kind: dataset, train: rows.jsonl, validation: rows.jsonl, prompt: '{{question}}', answer_field: answer, \
             rewards: [{{kind: python, file: rewards.py, function: short}}]}}\n\
             rollout: {{n: 8, prompt_length: 8, response_length: 24, stop: {stop}}}\n\
             trainer: {{steps: 2, train_batch_size: 2, test_freq: 2}}\n",
            fixtures().join("models/qwen2-tied").display(),
            bench.path("run").display()
        ),
    );
    succeeded(&bench.firebrick("train", &[]));
    let samples = bench.read("run/samples.jsonl");
    let samples: Vec<Value> = samples.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut stopped = 0;
    for sample in &samples {
        let text = sample["completion"].as_str().unwrap();
        for letter in stop.as_array().unwrap() {
            assert!(!text.contains(letter.as_str().unwrap()), "{sample}");
        }
        assert_eq!(sample["reward"].as_f64(), Some(text.chars().count() as f64), "{sample}");
        stopped += usize::from(sample["finish"] == "stop");
    }
    assert!(2 * stopped > samples.len(), "{stopped} of {}", samples.len());
}
