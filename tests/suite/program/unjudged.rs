//! Completions to which no reward applies, steps in which nothing can be learnt, and functions that return something else
//! than a reward each. Where there is no Python, these tests say so.

use super::runs::{metrics, weights};
use super::{Bench, stderr, succeeded};
use crate::support::{fixtures, report};
use serde_json::Value;
use std::process::{Command, Output};

const FUNCTIONS: &str = "
def half(completions, **kwargs):
    return [None if i % 2 else float(i) for i, _ in enumerate(completions)]
def none(completions, **kwargs):
    return [float('nan')] * len(completions)
def one(completions, **kwargs):
    return [1.0]
def spread(completions, **kwargs):
    return [float(i) for i, _ in enumerate(completions)]
";

const CONFIG: &str = "
model: {path: MODEL}
task:
  kind: dataset
  train: rows.jsonl
  prompt: '{q}'
  rewards: [{kind: python, file: rewards.py, function: half, name: own}]
output: run
device: cpu
rollout: {n: 4, prompt_length: 16, response_length: 4}
optim: {lr: 1.0e-2, weight_decay: 0.1}
trainer: {steps: 2, train_batch_size: 2, save_freq: 1}
";

/// A folder with the functions; none, said aloud, where this machine has no Python.
fn bench() -> Option<Bench> {
    if Command::new("python3").arg("--version").output().is_err() {
        report("skipped: there is no python3 on this machine");
        return None;
    }
    let bench = Bench::new();
    let model = fixtures().join("models/qwen2-tied");
    bench.write("config.yaml", &CONFIG.replace("MODEL", model.to_str().unwrap()));
    bench.write("rewards.py", FUNCTIONS);
    bench.write("rows.jsonl", "{\"q\": \"count to 1\"}\n{\"q\": \"count to 2\"}\n");
    Some(bench)
}

fn train(bench: &Bench, function: &str, more: &[&str]) -> Output {
    let function = format!("task.rewards.0.function={function}");
    bench.firebrick("train", &[&[function.as_str()], more].concat())
}

fn value(line: &Value, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key}: {line}"))
}

#[test]
fn a_completion_without_a_reward_has_no_advantage_no_part_in_means_and_is_counted() {
    let Some(bench) = bench() else { return };
    succeeded(&train(&bench, "half", &["objective.scale_rewards=none"]));
    for line in &metrics(&bench, "run")[1..] {
        let expected = [
            ("rollout/unjudged", 4.0),
            ("reward/own/missing", 4.0),
            ("rollout/masked", 0.0),
            ("actor/skipped_empty", 0.0),
            ("critic/score/mean", 1.0),
            ("critic/score/min", 0.0),
            ("critic/score/max", 2.0),
            ("reward/own/mean", 1.0),
            ("critic/advantages/max", 1.0),
            ("critic/advantages/min", -1.0),
        ];
        for (key, expected) in expected {
            assert!((value(line, key) - expected).abs() < 1e-9, "{key}: {line}");
        }
    }
    let text = bench.read("run/samples.jsonl");
    let samples: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(samples.len(), 16);
    for sample in samples {
        // of the values 0 and 2 of a group the mean is 1
        let (reward, advantage) = [(Some(0.0), -1.0), (None, 0.0), (Some(2.0), 1.0), (None, 0.0)]
            [sample["sample"].as_u64().unwrap() as usize];
        assert_eq!(sample["reward"].as_f64(), reward, "{sample}");
        assert!((sample["advantage"].as_f64().unwrap() - advantage).abs() < 1e-9, "{sample}");
    }
    assert!(weights(&bench, "run", 1) != weights(&bench, "run", 2));
}

#[test]
fn a_step_without_a_token_to_learn_from_moves_no_weight_and_is_counted_with_a_warning() {
    let cut = ["objective={name: dapo, mask_truncated_completions: true}", "rollout.response_length=1"];
    let rejected = ["objective={name: grpo, rollout_is: token_mask, rollout_is_threshold_lower: 1.9}", "rollout.n=4"];
    let critic = ["objective={name: ppo}", "critic={}"];
    let cases: [(&str, &[&str], [f64; 2]); 4] = [
        ("none", &[], [8.0, 0.0]),
        ("none", &critic, [8.0, 0.0]),
        ("half", &cut, [4.0, 4.0]),
        // no importance weight is as large as that: all are 0
        ("spread", &rejected, [0.0, 0.0]),
    ];
    for (function, more, [unjudged, masked]) in cases {
        let Some(bench) = bench() else { return };
        let output = train(&bench, function, more);
        succeeded(&output);
        assert!(stderr(&output).contains("no token has a weight in the loss"), "{function}: {}", stderr(&output));
        for line in &metrics(&bench, "run")[1..] {
            assert!((value(line, "actor/skipped_empty") - 1.0).abs() < 1e-9, "{line}");
            assert!((value(line, "rollout/unjudged") - unjudged).abs() < 1e-9, "{line}");
            assert!((value(line, "rollout/masked") - masked).abs() < 1e-9, "{line}");
            assert!(line["actor/grad_norm"].is_null() && line["actor/pg_loss"].is_null(), "{line}");
            if more == critic {
                assert!((value(line, "critic/skipped_empty") - 1.0).abs() < 1e-9, "{line}");
            }
        }
        assert!(weights(&bench, "run", 1) == weights(&bench, "run", 2), "{function} {more:?}: decay or momentum");
    }
}

#[test]
fn a_function_that_returns_another_number_of_rewards_ends_the_run_with_its_place_and_both_numbers() {
    let Some(bench) = bench() else { return };
    let output = train(&bench, "one", &[]);
    assert!(!output.status.success());
    let message = stderr(&output);
    for part in ["reward `own`: `one` (", "rewards.py, line 6)", "returned 1 rewards for 4 completions"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
    assert!(
        !bench.path("run/samples.jsonl").exists() || bench.read("run/samples.jsonl").is_empty(),
        "no step is trained"
    );
}

#[test]
fn validation_leaves_out_completions_without_a_reward_and_counts_them() {
    let Some(bench) = bench() else { return };
    let validation = ["task.validation=rows.jsonl", "rollout.val_kwargs={n: 4, temperature: 1.0}", "trainer.steps=1"];
    succeeded(&train(&bench, "half", &validation));
    let line = metrics(&bench, "run").remove(0);
    assert!((value(&line, "val-core/dataset/reward") - 1.0).abs() < 1e-9, "of 0 and 2: {line}");
    assert!((value(&line, "val-aux/dataset/unjudged") - 4.0).abs() < 1e-9, "{line}");
    let none = ["task.rewards.0.function=none", "output=other"];
    let output = bench.firebrick("train", &[&none[..], &validation].concat());
    succeeded(&output);
    assert!(stderr(&output).contains("there is no validation reward"), "{}", stderr(&output));
    let line = metrics(&bench, "other").remove(0);
    assert!(
        line["val-core/dataset/reward"].is_null() && (value(&line, "val-aux/dataset/unjudged") - 8.0).abs() < 1e-9,
        "{line}"
    );
    let printed = succeeded(&bench.firebrick("eval", &[&none[..1], &validation[..2]].concat()));
    assert!(printed.contains("reward none over 2 prompts (8 completions without a reward)"), "{printed}");
}
