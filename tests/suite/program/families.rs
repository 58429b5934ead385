//! Every model family takes a GRPO, a PPO and a supervised step with the program: the word "runs" of
//! `docs/reference/support.md`.

use super::runs::metrics;
use super::{Bench, succeeded};
use crate::support::fixtures;
use serde_json::Value;

/// Checkpoints with random weights, and the `model_type` of each.
const FAMILIES: [(&str, &str); 13] = [
    ("llama-gqa", "llama"),
    ("mistral-window", "mistral"),
    ("qwen2-tied", "qwen2"),
    ("qwen3-sharded", "qwen3"),
    ("qwen3-moe", "qwen3_moe"),
    ("gemma2", "gemma2"),
    ("gemma3", "gemma3_text"),
    ("smollm3", "smollm3"),
    ("olmo3", "olmo3"),
    ("ministral3", "ministral3"),
    ("qwen3_5", "qwen3_5"),
    ("qwen3_5-moe", "qwen3_5_moe"),
    ("gpt-oss", "gpt_oss"),
];

/// Every completion earns 1, so that a critic has something to learn; a policy learns from the entropy.
const CONFIG: &str = "
model: {path: MODEL}
output: OUTPUT
device: cpu
task: {kind: jsonl, train: rows.jsonl, prompt: '{q}', answer_field: a, solution_field: a,
       rewards: [{kind: regex, pattern: '^'}]}
rollout: {n: 2, prompt_length: 32, response_length: 4}
trainer: {steps: 1, train_batch_size: 2, save_freq: 1}
optim: {lr: 1.0e-3}
sft: {steps: 1, batch_size: 2, optim: {lr: 1.0e-3}}
";

/// The gradient's norm in the only step, of `actor` or `critic`; above 0, since a step without gradients teaches
/// nothing.
fn grad_norm(bench: &Bench, run: &str, model: &str) {
    let lines = metrics(bench, run);
    let norm = |line: &Value| line[format!("{model}/grad_norm")].as_f64();
    let found = lines.iter().find_map(norm).unwrap_or_else(|| panic!("{run}: no {model}/grad_norm in {lines:?}"));
    assert!(found.is_finite() && found > 0.0, "{run}: {model}/grad_norm {found}");
}

fn steps(range: std::ops::Range<usize>) {
    for (model, model_type) in &FAMILIES[range] {
        let folder = fixtures().join("models").join(model);
        let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["model_type"], *model_type, "{model}");
        let bench = Bench::new();
        let rows = ["17 + 25", "9 + 9"].map(|sum| serde_json::json!({"q": sum, "a": "a number"}).to_string());
        bench.write("rows.jsonl", &rows.join("\n"));
        let text = CONFIG.replace("MODEL", folder.to_str().unwrap());
        bench.write("config.yaml", &text.replace("OUTPUT", bench.path("run").to_str().unwrap()));
        let run = |command: &str, name: &str, more: &[&str]| {
            let output = format!("output={}", bench.path(name).display());
            succeeded(&bench.firebrick(command, &[&[output.as_str()], more].concat()));
        };
        run("train", "grpo", &["objective={name: grpo, entropy_coeff: 0.01}"]);
        grad_norm(&bench, "grpo", "actor");
        run("train", "ppo", &["objective={name: ppo, entropy_coeff: 0.01}"]);
        grad_norm(&bench, "ppo", "actor");
        grad_norm(&bench, "ppo", "critic");
        run("sft", "sft", &[]);
        grad_norm(&bench, "sft", "actor");
    }
}

#[test]
fn every_dense_family_takes_a_grpo_a_ppo_and_a_supervised_step() {
    steps(0..4);
    steps(5..10);
}

#[test]
fn every_family_with_experts_or_linear_attention_takes_a_grpo_a_ppo_and_a_supervised_step() {
    steps(4..5);
    steps(10..13);
}
