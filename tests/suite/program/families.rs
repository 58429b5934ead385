//! Every model family takes a GRPO, a PPO and a supervised step with the program: the word "runs" of
//! `docs/reference/support.md`.

use super::runs::metrics;
use super::{Bench, succeeded};
use crate::support::fixtures;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The first checkpoint in f32 of each `model_type` among the fixtures, dense ones with full attention or the others.
fn families(dense: bool) -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(fixtures().join("models")).unwrap();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    let mut families = BTreeMap::new();
    for folder in folders {
        let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
        let is_dense = !text.contains("experts") && !text.contains("linear_attention");
        if is_dense == dense && !text.contains("bfloat16") {
            let config: Value = serde_json::from_str(&text).unwrap();
            families.entry(config["model_type"].as_str().unwrap().to_owned()).or_insert(folder);
        }
    }
    families
}

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

fn steps(families: &BTreeMap<String, PathBuf>) {
    for folder in families.values() {
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
    let families = families(true);
    assert!(families.len() >= 9, "{families:?}");
    steps(&families);
}

#[test]
fn every_family_with_experts_or_linear_attention_takes_a_grpo_a_ppo_and_a_supervised_step() {
    let families = families(false);
    assert!(families.len() >= 4, "{families:?}");
    steps(&families);
}
