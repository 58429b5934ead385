//! Validation of several completions and several sets, `firebrick eval` with its samples, and ground truths that rules
//! refuse.

use serde_json::Value;

use super::{Bench, refused, stderr, succeeded};

fn lines(text: &str) -> Vec<Value> {
    let lines = text.lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

const SAMPLED: [&str; 2] = ["rollout.val_kwargs.n=4", "rollout.val_kwargs.temperature=1.0"];

#[test]
fn several_completions_a_prompt_give_verls_statistics_in_training_and_eval() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &[&SAMPLED[..], &["trainer.steps=1"]].concat()));
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    let value = |name: &str| {
        let value = metrics[1][format!("val-{name}")].as_f64();
        value.unwrap_or_else(|| panic!("{name}: {}", metrics[1]))
    };
    let mean = value("core/arithmetic/acc/mean@4");
    assert!((mean - value("core/arithmetic/reward")).abs() < 1e-12);
    assert!((mean - value("aux/arithmetic/acc/pass@1")).abs() < 1e-12);
    assert!(value("core/arithmetic/acc/best@4/mean") <= value("core/arithmetic/acc/pass@4") + 1e-12);
    for name in [
        "core/arithmetic/acc/maj@4/mean",
        "aux/arithmetic/acc/best@2/mean",
        "aux/arithmetic/acc/worst@4/mean",
        "aux/arithmetic/acc/pass@2",
        "aux/arithmetic/reward/mean@4",
    ] {
        assert!((0.0..=1.0).contains(&value(name)), "{name}");
    }

    let model = bench.path("run/checkpoints/step-000001/model");
    let args = ["--json", "--samples", "samples.jsonl", "--model", model.to_str().unwrap()];
    let said = succeeded(&bench.firebrick("eval", &[&args[..], &SAMPLED].concat()));
    let result: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(result["metrics"]["val-core/arithmetic/acc/mean@4"], mean);
    assert_eq!(result["prompts"], 10);
    let samples = lines(&bench.read("samples.jsonl"));
    assert_eq!(samples.len(), 40);
    let right = samples.iter().filter(|sample| sample["acc"] == true).count();
    assert!((right as f64 / 40.0 - mean).abs() < 1e-12);
    for sample in &samples {
        let reading = &sample["readings"][0];
        assert_eq!(reading["gold"], sample["answer"], "{sample}");
        assert_eq!(reading["parsed"] == reading["gold"] && sample["finish"] == "stop", sample["acc"] == true);
    }
    let text = succeeded(&bench.firebrick("eval", &[&args[3..], &SAMPLED].concat()));
    assert!(text.contains("\nval-core/arithmetic/acc/pass@4 "), "{text}");
}

#[test]
fn without_val_before_train_only_the_steps_are_followed_by_a_validation() {
    let bench = Bench::new();
    succeeded(&bench.firebrick("train", &["trainer.steps=2", "trainer.test_freq=1", "trainer.val_before_train=false"]));
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    let validated = |line: &&Value| line.get("val-core/arithmetic/reward").is_some();
    let steps: Vec<u64> =
        metrics.iter().filter(validated).map(|line| line["training/global_step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2]);
}

#[test]
fn more_than_one_greedy_completion_is_refused() {
    let bench = Bench::new();
    let refused = bench.firebrick("eval", &SAMPLED[..1]);
    assert!(!refused.status.success());
    let message = stderr(&refused);
    assert!(message.contains("greedy completions of a prompt are all the same"), "{message}");
}

#[test]
fn rows_of_two_sources_are_two_sets_and_samples_say_what_was_read() {
    let bench = Bench::new();
    let row = |source: &str, i: usize| {
        format!("{{\"data_source\": \"{source}\", \"q\": \"{i}+1=\", \"a\": \"{}\"}}\n", i + 1)
    };
    let rows: String = (0..8_usize).map(|i| row(if i.is_multiple_of(2) { "even" } else { "odd" }, i)).collect();
    bench.write("rows.jsonl", &rows);
    let task = "task={kind: jsonl, name: sums, train: rows.jsonl, validation: rows.jsonl, prompt: '{q}', answer_field: a, \
                rewards: [{kind: math}]}";
    let fixtures = crate::support::fixtures().join("models/llama-gqa");
    let model = format!("model.path={}", fixtures.display());
    let args = [task, "model.arch=null", &model, "rollout.prompt_length=32", "trainer.steps=1"];
    succeeded(&bench.firebrick("train", &args));
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    for name in ["val-core/even/acc/mean@1", "val-core/odd/reward", "val-core/sums/reward"] {
        assert!(metrics[0][name].is_number(), "{name}: {}", metrics[0]);
    }
    assert!(metrics[0].get("val-core/sums/acc/mean@1").is_none());
    for sample in lines(&bench.read("run/samples.jsonl")) {
        let reading = &sample["readings"][0];
        assert_eq!((&reading["reward"], &reading["gold"]), (&Value::from("math"), &sample["answer"]));
    }
}

#[test]
fn named_validation_files_are_sets_of_their_own_whatever_their_rows_say() {
    let bench = Bench::new();
    let rows = |source: &str, first: usize| -> String {
        let row = |i: usize| format!("{{\"data_source\": \"{source}\", \"q\": \"{i}+1=\", \"a\": \"{}\"}}\n", i + 1);
        (first..first + 3).map(row).collect()
    };
    bench.write("train.jsonl", &rows("one", 0));
    bench.write("data/small.jsonl", &rows("one", 10));
    bench.write("data/large-1.jsonl", &rows("one", 100));
    bench.write("data/large-2.jsonl", &rows("two", 200));
    let task = |validation: &str| {
        format!(
            "task={{kind: dataset, name: sums, train: train.jsonl, validation: {validation}, prompt: '{{q}}', answer_field: a, \
             rewards: [{{kind: math}}]}}"
        )
    };
    let fixtures = crate::support::fixtures().join("models/llama-gqa");
    let model = format!("model.path={}", fixtures.display());
    let run = |validation: &str| {
        let args = [
            task(validation),
            "model.arch=null".to_owned(),
            model.clone(),
            "rollout.prompt_length=32".to_owned(),
            "trainer.steps=1".to_owned(),
        ];
        bench.firebrick("train", &args.each_ref().map(String::as_str))
    };
    succeeded(&run("{small: data/small.jsonl, large: [data/large-1.jsonl, data/large-2.jsonl]}"));
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    let value = |name: &str| metrics[0][format!("val-core/{name}")].as_f64();
    let (small, large) = (value("small/reward"), value("large/reward"));
    let all = value("sums/reward").expect("of all");
    // three prompts and six
    let mean = (3.0 * small.expect("a set") + 6.0 * large.expect("a set")) / 9.0;
    assert!((all - mean).abs() < 1e-12);
    assert!(value("large/acc/mean@1").is_some());
    assert!(value("one/reward").is_none() && value("two/reward").is_none());
    refused(&run("{sums: data/small.jsonl}"), &["task.validation", "validation set `sums`"]);
}

#[test]
fn a_ground_truth_that_its_rule_refuses_stops_the_run_with_its_row() {
    let bench = Bench::new();
    bench.write("rows.jsonl", "{\"q\": \"1\", \"a\": \"5\"}\n{\"q\": \"2\", \"a\": \"1,000\"}\n");
    let task = "task={kind: jsonl, train: rows.jsonl, prompt: '{q}', answer_field: a, rewards: [{kind: verl_gsm8k}]}";
    let refused = bench.firebrick("train", &[task]);
    assert!(!refused.status.success());
    let message = stderr(&refused);
    assert!(message.contains("rows.jsonl, line 2"), "{message}");
    assert!(message.contains("scores its ground truth 0"), "{message}");
}

#[test]
fn countdown_is_a_task_that_trains() {
    let bench = Bench::new();
    let task = "task={kind: countdown, style: short, numbers: 2, max_number: 9, max_target: 20, validation_size: 10}";
    let rollout = "rollout={n: 4, prompt_length: 10, response_length: 6}";
    succeeded(&bench.firebrick("train", &[task, rollout, "trainer.steps=1"]));
    let metrics = lines(&bench.read("run/metrics.jsonl"));
    assert!(metrics[1]["val-core/countdown/acc/mean@1"].is_number(), "{}", metrics[1]);
    let samples = lines(&bench.read("run/samples.jsonl"));
    assert_eq!(samples.len(), 16);
    assert!(samples[0]["answer"].as_str().unwrap().starts_with("{\"target\": "));
}
