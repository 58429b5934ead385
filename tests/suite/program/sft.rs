//! Supervised runs on rows of a file: epochs, validation loss, resuming, and what they refuse.

use super::runs::metrics;
use super::{Bench, program, refused, succeeded};
use crate::support::fixtures;
use serde_json::{Value, json};

/// Seven conversations to learn from and two to validate on.
fn chats(bench: &Bench, sft: &str) {
    let row = |i: usize| {
        let turn = |role: &str, content: String| json!({"role": role, "content": content});
        let mut messages = vec![turn("user", format!("What comes after {i}?")), turn("assistant", (i + 1).to_string())];
        if i.is_multiple_of(3) {
            messages.push(turn("user", "And then?".into()));
            messages.push(turn("assistant", format!("{} it is.", i + 2)));
        }
        json!({ "messages": messages }).to_string()
    };
    let lines = |range: std::ops::Range<usize>| range.map(row).collect::<Vec<_>>().join("\n");
    bench.write("train.jsonl", &lines(0..7));
    bench.write("validation.jsonl", &lines(7..9));
    let model = fixtures().join("models/qwen2-tied");
    bench.write(
        "config.yaml",
        &format!(
            "model: {{path: {}}}\noutput: {}\ndevice: cpu\nsft: {{train: train.jsonl, validation: validation.jsonl, \
             batch_size: 3, optim: {{lr: 0.003}}, {sft}}}\ntrainer: {{test_freq: 2, save_freq: 2}}\n",
            model.display(),
            bench.path("run").display()
        ),
    );
}

fn number(line: &Value, key: &str) -> f64 {
    let value = line[key].as_f64();
    value.unwrap_or_else(|| panic!("{key} is not in {line}"))
}

#[test]
fn supervised_training_that_judges_nothing_starts_no_reward_programs() {
    let bench = Bench::new();
    chats(&bench, "epochs: 1");
    bench.write("rows.jsonl", "{\"question\": \"What comes after 1?\", \"answer\": \"2\"}\n");
    let task = "task={kind: dataset, train: rows.jsonl, messages: [{role: user, content: '{question}'}], answer_field: answer, \
                rewards: [{kind: command, command: [no-such-program]}]}";
    let config = bench.path("config.yaml");
    let run = |command: &str, more: &[&str]| {
        let mut own = program(&[&[command, config.to_str().unwrap(), task], more].concat());
        own.current_dir(bench.path("")).output().unwrap()
    };
    succeeded(&run("sft", &[]));
    assert_eq!(metrics(&bench, "run").len(), 1 + 3);
    // where completions of validation prompts are judged, the program is needed
    let judged = ["task.validation=rows.jsonl", "output=judged", "rollout={prompt_length: 64, response_length: 8}"];
    refused(&run("sft", &judged), &["no-such-program"]);
}

#[test]
fn rows_of_chats_are_learnt_in_epochs_without_a_task() {
    let bench = Bench::new();
    chats(&bench, "epochs: 3");
    succeeded(&bench.firebrick("sft", &[]));
    let lines = metrics(&bench, "run");
    // seven rows by three are three steps an epoch, the last of one row
    assert_eq!(lines.len(), 1 + 9);
    for epoch in 1..=3 {
        let found = number(&lines[3 * epoch], "training/epoch");
        assert!((found - epoch as f64).abs() < 1e-12, "{found}");
    }
    let (first, last) = (number(&lines[0], "val/loss"), number(&lines[9], "val/loss"));
    assert!(last < first - 0.5, "from {first} to {last}");
    let perplexity = number(&lines[9], "val/perplexity");
    assert!((perplexity - last.exp()).abs() < 1e-9 * perplexity);
    assert!(lines[1]["val/loss"].is_null() && lines[2]["val/loss"].is_number());
    let summary: Value = serde_json::from_str(&bench.read("run/summary.json")).unwrap();
    assert_eq!(summary["last"]["val/loss"].as_f64(), Some(last));
}

#[test]
fn a_resumed_supervised_run_equals_one_that_was_never_stopped() {
    let bench = Bench::new();
    chats(&bench, "epochs: 2");
    let whole = format!("output={}", bench.path("whole").display());
    succeeded(&bench.firebrick("sft", &["sft.epochs=4", &whole]));
    succeeded(&bench.firebrick("sft", &[]));
    succeeded(&bench.firebrick("sft", &["sft.epochs=4", "--resume"]));
    assert_eq!(metrics(&bench, "run"), metrics(&bench, "whole"));
    let weights = |run: &str| {
        let file = format!("{run}/checkpoints/step-000012/model/model.safetensors");
        std::fs::read(bench.path(&file)).unwrap()
    };
    assert!(weights("run") == weights("whole"), "the weights differ");
    refused(&bench.firebrick("sft", &["sft.epochs=null", "sft.steps=20", "--resume"]), &["differs", "sft"]);
}

#[test]
fn supervised_settings_that_cannot_work_are_refused() {
    let bench = Bench::new();
    for (overrides, parts) in [
        (&["sft.steps=2", "sft.epochs=2"][..], &["steps and epochs"][..]),
        (&["sft.epochs=2"], &["sft.epochs", "endless", "sft.steps"]),
        (&["sft.epochs=0"], &["at least 1"]),
        (&["sft.until_reward=0.5"], &["only warmup.sft can stop early"]),
        (&["warmup.sft.validation=rows.jsonl"], &["warmup.sft.validation", "`firebrick sft`"]),
        (&["sft.train=no/such.jsonl"], &["no/such.jsonl", "sft.train"]),
    ] {
        refused(&bench.firebrick("sft", overrides), parts);
    }
    chats(&bench, "steps: 2");
    for (row, part) in [
        (r#"{"text": "x"}"#, "expected `messages` (a list)"),
        (r#"{"prompt": "x", "completion": [{"role": "user", "content": "y"}]}"#, "both strings"),
        (r#"{"messages": [{"role": "user", "content": "y"}]}"#, "no assistant turn with text"),
        (r#"{"messages": [{"role": "assistant", "content": "y"}]}"#, "begins with an assistant"),
    ] {
        bench.write("bad.jsonl", row);
        refused(&bench.firebrick("sft", &["sft.train=bad.jsonl"]), &["bad.jsonl, line 1", "sft.train", part]);
    }
    refused(&bench.firebrick("sft", &["sft.max_length=5"]), &["sft.train", "longer than 5 tokens", "raise max_length"]);
}

#[test]
fn a_warm_up_learns_from_rows_too() {
    let bench = Bench::new();
    chats(&bench, "steps: 1");
    let data = fixtures().join("gsm8k");
    let task = format!(
        "task={{kind: jsonl, train: {}, prompt: '{{question}}', limit: 20, rewards: [{{kind: length, max: 4}}]}}",
        data.join("train.jsonl").display()
    );
    let warmup = format!("warmup.sft={{train: {}, epochs: 1, batch_size: 4}}", bench.path("train.jsonl").display());
    let small = ["rollout={n: 2, prompt_length: 128, response_length: 8}", "trainer={steps: 1, train_batch_size: 2}"];
    let output = bench.firebrick("train", &[&[task.as_str(), warmup.as_str()][..], &small].concat());
    succeeded(&output);
    assert_eq!(metrics(&bench, "run").len(), 2);
}

#[test]
fn a_plan_of_supervised_training_reads_the_rows_and_predicts_what_the_run_says_of_itself() {
    let bench = Bench::new();
    chats(&bench, "epochs: 1");
    let plan = |args: &[&str]| -> Value {
        let args = [&["--json"], args].concat();
        serde_json::from_str(&succeeded(&bench.firebrick("plan", &args))).unwrap()
    };
    let read = plan(&[]);
    let names: Vec<&str> = read["phases"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    // the validation rows are scored, and nothing is sampled
    assert_eq!(names, ["load", "score", "backward", "optimizer", "save"]);
    assert_eq!(read["batch"]["effective_batch"], 3);
    let said = succeeded(&bench.firebrick("plan", &[]));
    assert!(said.contains("3 examples of up to") && !said.contains("sampled at a time"), "{said}");

    succeeded(&bench.firebrick("sft", &[]));
    let own: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
    assert_eq!(own["phases"], read["phases"]);

    // one longer row, and the step needs more
    let backward = |plan: &Value| plan["phases"][2]["total_bytes"].as_u64().unwrap();
    let long = json!({"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "1 2 3 4 ".repeat(6)}]});
    let rows = bench.read("train.jsonl");
    bench.write("train.jsonl", &format!("{rows}\n{long}"));
    assert!(backward(&plan(&[])) > backward(&read));
}

#[test]
fn a_plan_makes_room_for_the_solutions_of_a_task() {
    let bench = Bench::new();
    let plan = |args: &[&str]| -> Value {
        let args = [&["--json"], args].concat();
        serde_json::from_str(&succeeded(&bench.firebrick("plan", &args))).unwrap()
    };
    let own = plan(&["sft={batch_size: 5}"]);
    assert_eq!(own["batch"]["effective_batch"], 5);
    let said = succeeded(&bench.firebrick("plan", &["sft={batch_size: 5}"]));
    // 9+9=18 and the end token
    assert!(said.contains("5 examples of up to 7 tokens"), "{said}");
    // validation samples
    assert!(own["phases"].as_array().unwrap().iter().any(|p| p["name"] == "rollout"));
    assert_eq!(own["seconds"]["rollout"], 0.0);
}

#[test]
fn the_longest_solution_among_many_rows_has_room_and_max_length_leaves_longer_ones_out() {
    let bench = Bench::new();
    let long = (0..60).map(|i| i.to_string()).collect::<Vec<_>>().join(" ");
    let rows = |n: usize, last: &str| {
        let row = |i: usize, s: &str| format!("{{\"q\": \"add {i}\", \"s\": \"{s}\"}}\n");
        let all: Vec<String> = (0..n).map(|i| row(i % 97, "7")).chain([row(1, last)]).collect();
        all.concat()
    };
    let model = format!("model.path={}", fixtures().join("models/qwen2-tied").display());
    let task = "task={kind: dataset, train: rows.jsonl, prompt: '{q}', answer: '{s}', solution: '{s}', \
                rewards: [{kind: exact}]}";
    let sft = |max: &str| {
        let _ = std::fs::remove_dir_all(bench.path("run"));
        let sft = format!("sft={{steps: 2, batch_size: 2, max_length: {max}}}");
        let fixed = [task, "model.arch=null", &model, "memory.budget=40MiB", "rollout.prompt_length=16"];
        bench.firebrick("sft", &[&fixed[..], &[sft.as_str()]].concat())
    };
    let trained = |bench: &Bench| {
        let plan: Value = serde_json::from_str(&bench.read("run/plan.json")).unwrap();
        plan["plan"]["models"]["policy"]["train_tokens"].as_u64().unwrap()
    };
    // more than are looked at in a sample, which does not have the last one
    bench.write("rows.jsonl", &rows(10_001, &long));
    succeeded(&sft("null"));
    assert!(trained(&bench) > 100, "{}", trained(&bench));
    bench.write("rows.jsonl", &rows(6, &long));
    let output = sft("30");
    succeeded(&output);
    let said = super::stderr(&output);
    assert!(said.contains("1 of 7 prompts with their solutions are longer than 30 tokens"), "{said}");
    refused(&sft("3"), &["all 7 prompts with their solutions are longer than 3 tokens", "raise sft.max_length"]);
}
