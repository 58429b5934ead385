//! A step that is run again from the checkpoint before it, and compared with the run.

use super::{Bench, firebrick, refused, stderr, succeeded};
use serde_json::Value;
use std::process::Output;

/// A run of four steps with checkpoints of steps 2 and 4.
fn trained() -> Bench {
    let bench = Bench::new();
    let settings = ["trainer.steps=4", "trainer.save_freq=2", "objective.kl_loss_coef=0.05", "rollout.n=2"];
    succeeded(&bench.firebrick("train", &settings));
    bench
}

fn replay(bench: &Bench, step: &str) -> Output {
    firebrick(&["replay", bench.path("run").to_str().unwrap(), "--step", step])
}

/// The replay must differ, with a message that holds all of these.
fn differs(bench: &Bench, step: &str, parts: &[&str]) {
    let output = replay(bench, step);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(6), "{message}");
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
}

/// Changes the JSON line of a file that has these values.
fn change(bench: &Bench, file: &str, [key, wanted]: [&str; 2], edit: impl Fn(&mut Value)) {
    let mut found = false;
    let changed = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap();
        let is_wanted = format!("{}", value[key]) == wanted;
        if is_wanted && !found {
            found = true;
            edit(&mut value);
        }
        format!("{value}\n")
    };
    let text: String = bench.read(file).lines().map(changed).collect();
    assert!(found, "no line of {file} has {key} {wanted}");
    bench.write(file, &text);
}

#[test]
fn a_replayed_step_is_identical_and_leaves_the_run_as_it_is() {
    let bench = trained();
    let files = || {
        let mut names: Vec<_> = std::fs::read_dir(bench.path("run")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        (names, bench.read("run/metrics.jsonl"), bench.read("run/samples.jsonl"), bench.read("run/run.log"))
    };
    let before = files();
    for (step, from, tensors) in [
        ("4", "the checkpoint of step 2", " tensors\n"),
        ("3", "the checkpoint of step 2", "no tensors, because the step has no checkpoint"),
        ("2", "the beginning of the run", " tensors\n"),
    ] {
        let said = succeeded(&replay(&bench, step));
        let identical = format!("step {step}, replayed from {from}, is identical: ");
        assert!(said.contains(&identical) && said.contains(tensors), "{said}");
    }
    assert!(files() == before);
    let beside = std::fs::read_dir(bench.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(!beside.into_iter().any(|name| name.to_string_lossy().contains("replay")), "no folder is left");
}

#[test]
fn the_first_value_that_differs_is_named_with_its_step_and_phase() {
    let bench = trained();
    let weights = bench.path("run/checkpoints/step-000004/model/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    differs(
        &bench,
        "4",
        &["step 4, phase save_checkpoint: value ", "(the first of 1 of ", "model/model.safetensors is "],
    );
    let step = |step| ["training/global_step", step];
    change(&bench, "run/metrics.jsonl", step("4"), |line| line["actor/grad_norm"] = Value::from(7.5));
    differs(&bench, "4", &["step 4, phase update_actor: actor/grad_norm is 7.5 in the run and "]);
    change(&bench, "run/metrics.jsonl", step("4"), |line| line["critic/score/max"] = Value::from(9.5));
    differs(&bench, "4", &["step 4, phase reward: critic/score/max is 9.5 in the run and "]);
    change(&bench, "run/samples.jsonl", ["step", "4"], |line| line["reward"] = Value::from(9.5));
    differs(&bench, "4", &["step 4, phase reward: reward of draw 12, sample 0 is 9.5 in the run and "]);
    change(&bench, "run/samples.jsonl", ["step", "4"], |line| line["completion"] = Value::from("another"));
    differs(&bench, "4", &["step 4, phase gen: completion of draw 12, sample 0 is \"another\" in the run and "]);
    // an earlier step comes first
    change(&bench, "run/metrics.jsonl", step("3"), |line| line["actor/entropy"] = Value::from(7.5));
    differs(&bench, "4", &["step 3, phase update_actor: actor/entropy is 7.5 in the run and "]);
    succeeded(&replay(&bench, "2"));
}

#[test]
fn a_step_that_cannot_be_replayed_is_refused() {
    let bench = trained();
    refused(&replay(&bench, "5"), &["metrics.jsonl has no step 5; its last step is 4"]);
    let other = bench.path("other");
    refused(&firebrick(&["replay", other.to_str().unwrap(), "--step", "1"]), &["other contains no run"]);
    let state = bench.path("run/checkpoints/step-000002/model/model.safetensors");
    let bytes = std::fs::read(&state).unwrap();
    std::fs::write(&state, &bytes[..bytes.len() - 1]).unwrap();
    refused(&replay(&bench, "4"), &["step-000002 is damaged: "]);
}
