//! Runs whose rewards are a model's and rules': what they add up to, what is normalised, and that they continue
//! exactly.

use super::runs::metrics;
use super::{Bench, firebrick, refused, stderr, succeeded};
use crate::support::{assert_close, fixtures, project};
use serde_json::Value;

/// The example with the suite's models, whatever the fixtures are.
fn run(bench: &Bench, output: &str, more: &[&str]) -> std::process::Output {
    let example = project().join("examples/reward_model.yaml");
    let fixtures = fixtures();
    let output = format!("output={}", bench.path(output).display());
    let model = format!("model.path={}", fixtures.join("models/qwen2-tied").display());
    let args = ["train", example.to_str().unwrap(), &output, &model];
    firebrick(&[&args[..], more].concat())
}

fn samples(bench: &Bench, run: &str) -> Vec<Value> {
    let text = bench.read(&format!("{run}/samples.jsonl"));
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

fn part(sample: &Value, name: &str) -> f64 {
    let parts = sample["reward_parts"].as_array().unwrap();
    let own = parts.iter().find(|p| p[0] == name).expect("the part");
    own[1].as_f64().unwrap()
}

#[test]
fn a_models_score_is_one_of_the_rewards_normalised_by_all_so_far_and_clipped() {
    let bench = Bench::new();
    succeeded(&run(&bench, "run", &["task.rewards.0.clip=[-0.5, 1.0]"]));
    let (samples, lines) = (samples(&bench, "run"), metrics(&bench, "run"));
    let mut scores: Vec<f64> = Vec::new();
    for (step, line) in lines.iter().enumerate().skip(1) {
        let own: Vec<&Value> = samples.iter().filter(|s| s["step"] == step).collect();
        scores.extend(own.iter().map(|s| part(s, "helpful")));
        let n = scores.len() as f64;
        let mean = scores.iter().sum::<f64>() / n;
        let squares: f64 = scores.iter().map(|s| (s - mean).powi(2)).sum();
        let std = (squares / (n - 1.0)).sqrt();
        for sample in &own {
            let normal = ((part(sample, "helpful") - mean) / (std + 1e-8)).clamp(-0.5, 1.0);
            let expected = 0.7 * normal + 0.3 * part(sample, "length");
            assert_close("reward", sample["reward"].as_f64().unwrap(), expected, 1e-9);
        }
        let of_step = own.iter().map(|s| part(s, "helpful")).sum::<f64>() / own.len() as f64;
        for (key, expected) in [
            ("reward/helpful/mean", of_step),
            ("reward/helpful/running_mean", mean),
            ("reward/helpful/running_std", std),
        ] {
            assert_close(key, line[key].as_f64().unwrap(), expected, 1e-9);
        }
    }
    assert!(scores.iter().any(|s| (s - scores[0]).abs() > 1e-3), "{scores:?}");
    assert!(lines[0]["val-core/jsonl/reward"].is_number());
}

#[test]
fn a_resumed_run_goes_on_with_the_same_statistics() {
    let bench = Bench::new();
    succeeded(&run(&bench, "whole", &["trainer.steps=4"]));
    succeeded(&run(&bench, "run", &["trainer.steps=2"]));
    succeeded(&run(&bench, "run", &["trainer.steps=4", "--resume"]));
    let learnt = |name| {
        let mut lines = metrics(&bench, name);
        for line in &mut lines {
            line.as_object_mut().unwrap().retain(|name, _| !name.starts_with("val-"));
        }
        lines
    };
    assert_eq!(learnt("run"), learnt("whole"));
    assert_eq!(samples(&bench, "run"), samples(&bench, "whole"));
}

#[test]
fn a_reward_model_is_planned_and_accounted() {
    let bench = Bench::new();
    succeeded(&run(&bench, "run", &["task.rewards.0.param_offload=none"]));
    let plan: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
    let phases = plan["phases"].as_array().unwrap();
    let bytes = |phase: &str| {
        let own = phases.iter().find(|p| p["name"] == phase);
        own.expect("the phase")["categories"]["reward_model"].as_u64()
    };
    let weights = bytes("reward").expect("bytes of the reward model");
    assert!(weights > 0);
    assert_eq!(bytes("backward"), Some(weights), "it stays on the device");
    let readings = bench.read("run/memory.jsonl");
    assert!(readings.contains("\"reward_model\""), "no account of it");
}

#[test]
fn checkpoints_that_are_no_reward_model_end_a_run_before_it_starts() {
    let bench = Bench::new();
    let wrong = format!("task.rewards.0.path={}", fixtures().join("models/llama-gqa").display());
    refused(&run(&bench, "run", &[&wrong]), &["reward `helpful`", "causal language model", "num_labels=1"]);
    assert!(!bench.path("run").exists());
    refused(&run(&bench, "run", &["task.rewards.0.clip=[1, 0]"]), &["rewards.helpful.clip", "ascending order"]);
    refused(
        &run(&bench, "run", &["task.rewards.0.normalise=true"]),
        &["unknown", "`normalise`", "did you mean `normalize`"],
    );
    let by_part = "objective={name: grpo, multi_objective_aggregation: normalize_then_sum}";
    refused(&run(&bench, "run", &[by_part]), &["normalize_then_sum", "`normalize`"]);
}

#[test]
fn lengths_that_leave_a_reward_model_no_room_are_refused_before_the_first_step_with_what_to_raise() {
    let bench = Bench::new();
    let budget = ["reward `helpful` needs", "its budget is 20", "raise its score_tokens"];
    let context = ["reward `helpful` needs", "its context is 256", "lower rollout.response_length"];
    let tokens = "task.rewards.0.input=tokens";
    let cases: [(&[&str], &[&str]); 4] = [
        (&["task.rewards.0.score_tokens=20"], &budget),
        (&["rollout.response_length=240"], &context),
        (&[tokens, "task.rewards.0.score_tokens=20"], &budget),
        (&[tokens, "rollout.response_length=240"], &context),
    ];
    for (more, parts) in cases {
        refused(&run(&bench, "run", more), parts);
        assert!(!bench.path("run").exists(), "{more:?}: nothing begins");
    }
    let example = project().join("examples/reward_model.yaml");
    let model = format!("model.path={}", fixtures().join("models/qwen2-tied").display());
    let eval = ["eval", example.to_str().unwrap(), &model, "rollout.response_length=240"];
    refused(&firebrick(&eval), &context);
}

#[test]
fn a_run_whose_completions_are_cut_before_they_earn_anything_says_so_once() {
    let bench = Bench::new();
    // an answer of one or two digits and its end token do not fit into one token
    let cut = bench.firebrick("train", &["rollout.response_length=1"]);
    succeeded(&cut);
    let said = stderr(&cut);
    let advice = "raise rollout.response_length";
    assert_eq!(said.matches(advice).count(), 1, "{said}");
    assert!(said.contains("rollout.response_length = 1 tokens"), "{said}");
}
