//! Whole runs: what they leave behind, and that a killed one continues as if nothing had happened.

use super::{Bench, stderr, succeeded};
use firebrick::engine::metrics::described;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Metrics that are promised to repeat: everything but times and bytes. Every metric must have a description.
pub(super) fn metrics(bench: &Bench, run: &str) -> Vec<Value> {
    let timed = |key: &str| ["timing", "perf/"].iter().any(|p| key.starts_with(p)) || key.ends_with("per_second");
    bench
        .read(&format!("{run}/metrics.jsonl"))
        .lines()
        .map(|line| {
            let mut line: serde_json::Map<String, Value> = serde_json::from_str(line).unwrap();
            for key in line.keys() {
                assert!(described(key).is_some(), "{key} has no description in engine/src/metrics/described.rs");
            }
            line.retain(|key, _| !timed(key));
            Value::Object(line)
        })
        .collect()
}

pub(super) fn weights(bench: &Bench, run: &str, step: u64) -> Vec<u8> {
    std::fs::read(bench.path(&format!("{run}/checkpoints/step-{step:06}/model/model.safetensors"))).unwrap()
}

#[test]
fn a_run_leaves_everything_it_promises() {
    let bench = Bench::new();
    let output =
        bench.firebrick("train", &["warmup.sft.steps=2", "objective.kl_loss_coef=0.01", "trainer.test_freq=2"]);
    succeeded(&output);
    for file in ["config.yaml", "plan.json", "metrics.jsonl", "memory.jsonl", "samples.jsonl", "summary.json"] {
        assert!(!bench.read(&format!("run/{file}")).is_empty(), "{file}");
    }
    let lines = metrics(&bench, "run");
    let steps: Vec<u64> = lines.iter().map(|l| l["training/global_step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 1, 2, 3]);
    for key in [
        "actor/pg_loss",
        "actor/entropy",
        "actor/grad_norm",
        "actor/kl_loss",
        "actor/lr",
        "critic/rewards/mean",
        "response_length/mean",
        "training/rollout_probs_diff_max",
        "frac_reward_zero_std",
    ] {
        assert!(lines[1][key].is_number(), "{key}: {}", lines[1]);
    }
    assert!(lines[1]["training/rollout_probs_diff_max"].as_f64().unwrap() < 1e-4);
    let validated: Vec<bool> = lines.iter().map(|l| l["val-core/arithmetic/reward"].is_number()).collect();
    assert_eq!(validated, [true, false, true, true]);
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    assert_eq!(summary["steps"], 3);
    assert!(summary["measured_peak_bytes"].as_u64().unwrap() > 0);
    assert_eq!(bench.read("run/samples.jsonl").lines().count(), 3 * 4 * 4);
    assert!(stderr(&output).contains("finished: 3 steps"), "{}", stderr(&output));
}

#[test]
fn the_resolved_config_reproduces_the_run() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["rollout.n=2"]));
    let resolved = bench.path("run/config.yaml");
    let again = bench.path("again");
    succeeded(&super::firebrick(&["train", resolved.to_str().unwrap(), &format!("output={}", again.display())]));
    assert_eq!(metrics(&bench, "run"), metrics(&bench, "again"));
    assert!(weights(&bench, "run", 3) == weights(&bench, "again", 3));
}

#[test]
fn a_run_that_never_saves_leaves_its_figures_and_no_checkpoint() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.save_freq=-1"]));
    assert_eq!(metrics(&bench, "run").len(), 4);
    assert!(!bench.path("run/checkpoints/step-000003").exists());
    let output = format!("output={}", bench.path("other").display());
    let wrong = bench.firebrick("train", &["trainer.save_freq=-2", &output]);
    super::refused(&wrong, &["trainer.save_freq", "-1 never"]);
}

#[test]
fn a_resumed_run_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    let kl = [
        "objective.kl_loss_coef=0.05",
        "warmup.sft.steps=2",
        "trainer.train_batch_size=4",
        "update.ppo_epochs=2",
        "update.ppo_mini_batch_size=2",
    ];
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&bench.firebrick("train", &[&kl[..], &["trainer.steps=5", &whole]].concat()));
    succeeded(&bench.firebrick("train", &[&kl[..], &["trainer.steps=3"]].concat()));
    let output = bench.firebrick("train", &[&kl[..], &["trainer.steps=5", "--resume"]].concat());
    succeeded(&output);
    assert!(stderr(&output).contains("resumed after step 3"), "{}", stderr(&output));
    assert!(weights(&bench, "run", 5) == weights(&bench, "whole", 5), "the weights differ");
    let plain = |run| {
        let mut lines = metrics(&bench, run);
        // the shorter run validated after its last step, the longer one had no reason to
        for line in &mut lines {
            line.as_object_mut().unwrap().retain(|name, _| !name.starts_with("val-"));
        }
        lines
    };
    assert_eq!(plain("run"), plain("whole"));
}

#[test]
fn a_run_killed_at_any_moment_goes_on_from_a_complete_checkpoint() {
    let bench = Bench::new();
    let config = bench.path("config.yaml");
    let args = ["train", config.to_str().unwrap(), "trainer.steps=4000", "trainer.save_freq=1"];
    let mut child = Command::new(super::program_path()).args(args).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    let saved = |n: usize| {
        let entries = std::fs::read_dir(bench.path("run/checkpoints"));
        entries.map_or(0, |e| e.flatten().filter(|f| !f.path().to_string_lossy().ends_with(".tmp")).count()) >= n
    };
    while !saved(2) {
        assert!(started.elapsed() < Duration::from_mins(1), "no checkpoint appeared");
        std::thread::sleep(Duration::from_millis(3));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let step = bench.read("run/metrics.jsonl").lines().count() as u64;
    let more = format!("trainer.steps={}", step + 2);
    succeeded(&bench.firebrick("train", &["--resume", &more, "trainer.save_freq=1"]));
    let steps: Vec<u64> = metrics(&bench, "run").iter().map(|l| l["training/global_step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (0..=step + 2).collect::<Vec<_>>(), "no step is missing and none stands twice");
}

#[test]
fn a_full_disk_ends_the_run_with_the_file_and_keeps_the_last_checkpoint() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=1"]));
    // a folder in a file's place fails every write to it, for root too
    std::fs::remove_file(bench.path("run/metrics.jsonl")).unwrap();
    std::fs::create_dir(bench.path("run/metrics.jsonl")).unwrap();
    let output = bench.firebrick("train", &["trainer.steps=2", "--resume"]);
    super::refused(&output, &["metrics.jsonl"]);
    assert!(bench.path("run/checkpoints/step-000001/trainer/state.json").is_file());
}

#[test]
fn a_gradient_that_is_not_finite_is_skipped_and_enough_of_them_end_the_run() {
    let bench = Bench::new();
    let output = bench.firebrick("train", &["optim.lr=1e30", "optim.clip_grad=null", "trainer.steps=100"]);
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    for part in ["not finite for 10 optimizer steps of update_actor in a row", "first: weight model."] {
        assert!(stderr(&output).contains(part), "{part}: {}", stderr(&output));
    }
}

#[test]
fn sft_learns_from_the_tasks_solutions_and_resumes() {
    let bench = Bench::new();
    let sft = ["sft.steps=40", "sft.batch_size=32", "sft.optim.lr=0.01", "trainer.save_freq=20"];
    succeeded(&bench.firebrick("sft", &sft));
    let lines = metrics(&bench, "run");
    let loss = |i: usize| lines[i]["train/loss"].as_f64().unwrap();
    assert!(loss(40) < 0.8 * loss(1), "{} -> {}", loss(1), loss(40));
    super::refused(
        &bench.firebrick("train", &["--resume", "sft.steps=40", "sft.batch_size=32", "sft.optim.lr=0.01"]),
        &["other command"],
    );
}

#[test]
fn an_exported_checkpoint_keeps_names_configs_and_element_types() {
    let bench = Bench::new();
    let model = crate::support::fixtures().join("models/llama-bf16");
    let row = |i: usize| format!("{{\"q\": \"{i} apples\", \"a\": \"{i}\"}}");
    let rows = (0..8).map(row).collect::<Vec<_>>().join("\n");
    bench.write("rows.jsonl", &rows);
    let task = "task={kind: jsonl, train: rows.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: number}]}";
    let path = format!("model.path={}", model.display());
    let args = [task, "model.arch=null", &path, "rollout.prompt_length=16", "trainer.max_shard_bytes=40000"];
    succeeded(&bench.firebrick("train", &[&args[..], &["trainer.steps=1"]].concat()));
    let exported = bench.path("run/checkpoints/step-000001/model");
    let value = |p: std::path::PathBuf| serde_json::from_str::<Value>(&std::fs::read_to_string(p).unwrap()).unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json"] {
        assert_eq!(value(exported.join(file)), value(model.join(file)), "{file}");
    }
    let index = value(exported.join("model.safetensors.index.json"));
    let source = std::fs::read(model.join("model.safetensors")).unwrap();
    let source = safetensors::SafeTensors::deserialize(&source).unwrap();
    assert_eq!(index["weight_map"].as_object().unwrap().len(), source.len());
    for (name, file) in index["weight_map"].as_object().unwrap() {
        let bytes = std::fs::read(exported.join(file.as_str().unwrap())).unwrap();
        let shard = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(shard.tensor(name).unwrap().dtype(), source.tensor(name).unwrap().dtype(), "{name}");
    }
    // weights of fewer bits keep their f32 masters beside them
    assert!(bench.path("run/checkpoints/step-000001/trainer/masters.safetensors").is_file());
}
