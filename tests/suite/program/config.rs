//! `firebrick config`, `new` and `completions`.

use super::{Bench, firebrick, program, refused, stderr, succeeded};
use serde_json::Value;
use std::process::{Output, Stdio};

fn check(bench: &Bench, overrides: &[&str]) -> Output {
    let config = bench.path("config.yaml");
    firebrick(&[&["config", "check", config.to_str().unwrap()], overrides].concat())
}

#[test]
fn a_configuration_without_mistakes_is_said_to_have_none() {
    let said = succeeded(&check(&Bench::new(), &[]));
    assert!(said.ends_with("config.yaml: no mistakes\n"), "{said}");
}

#[test]
fn every_mistake_is_printed_with_its_line_and_the_exit_code_is_one() {
    let bench = Bench::new();
    let text = bench.read("config.yaml");
    let wrong = text
        .replace("rollout: {n: 4,", "rollout: {n: four,")
        .replace("trainer: {steps: 3,", "trainer: {stepz: 3,");
    bench.write("config.yaml", &format!("{wrong}memory:\n  margin: 2\n"));
    let output = check(&bench, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("3 mistakes"),
        "{}",
        stderr(&output)
    );
    let said = String::from_utf8(output.stdout).unwrap();
    for part in [
        "config.yaml:8:14: rollout.n must be an integer, found the text \"four\"",
        "  8 | rollout: {n: four,",
        "config.yaml:10:11: trainer: unknown key `stepz`; did you mean `steps`?",
        "config.yaml:12:11: memory.margin must be below 0.9, found 2",
        "   |           ^",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

#[test]
fn what_only_a_plan_finds_is_a_mistake_too() {
    let bench = Bench::new();
    for (setting, part) in [
        ("memory.budget=1MiB", "no plan fits"),
        ("task.difficulty=9", "task.difficulty"),
        ("model={path: no/such/model}", "no/such/model"),
        (
            "task={kind: jsonl, train: nowhere.jsonl, rewards: [{kind: exact}]}",
            "nowhere.jsonl",
        ),
    ] {
        let output = check(&bench, &[setting]);
        assert_eq!(output.status.code(), Some(1), "{setting}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    refused(
        &firebrick(&["config", "check", "no/such.yaml"]),
        &["cannot read no/such.yaml"],
    );
}

#[test]
fn the_schema_is_json_and_an_explanation_names_what_others_call_a_key() {
    let schema: Value =
        serde_json::from_str(&succeeded(&firebrick(&["config", "schema"]))).unwrap();
    assert_eq!(
        schema["properties"]["rollout"]["properties"]["n"]["default"],
        8
    );
    let said = succeeded(&firebrick(&["config", "explain", "rollout.n"]));
    for part in [
        "default  8",
        "num_generations",
        "docs/configuration.md#rollout",
    ] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let all = succeeded(&firebrick(&["config", "explain"]));
    assert!(all.contains("  rollout "), "{all}");
    refused(
        &firebrick(&["config", "explain", "rolout.n"]),
        &["`rolout.n`", "rollout.n"],
    );
}

#[test]
fn a_new_configuration_has_no_mistakes_and_trains() {
    let bench = Bench::new();
    let new = |args: &[&str]| {
        let mut command = program(&[&["new"], args].concat());
        command.current_dir(bench.path("")).stdin(Stdio::null());
        command.output().unwrap()
    };
    let answers = [
        "--model",
        "tiny",
        "--data",
        "arithmetic",
        "--reward",
        "partial",
        "--memory",
        "1GiB",
        "--device",
        "cpu",
    ];
    let said = succeeded(&new(&answers));
    assert!(said.contains("firebrick train run.yaml"), "{said}");
    refused(&new(&answers), &["run.yaml exists"]);
    let short = [
        "warmup=null",
        "trainer.steps=1",
        "trainer.train_batch_size=4",
        "trainer.val_max_samples=4",
    ];
    let mut command = program(&[&["train", "run.yaml"], &short[..]].concat());
    succeeded(&command.current_dir(bench.path("")).output().unwrap());
    assert!(bench.path("runs/run/metrics.jsonl").exists());
    refused(
        &new(&["--model", "tiny", "--output", "other.yaml"]),
        &["--data", "--device"],
    );
    let output = [&answers[..2], &["--output", "other.yaml"]].concat();
    refused(&new(&output), &["without a terminal"]);
}

#[test]
fn a_new_configuration_of_puzzles_trains_a_model_from_random_weights() {
    let bench = Bench::new();
    let args = "new --model tiny --data countdown --reward partial --memory 1GiB --device cpu";
    let run = |args: &[&str]| {
        let mut command = program(args);
        command.current_dir(bench.path("")).stdin(Stdio::null());
        succeeded(&command.output().unwrap())
    };
    run(&args.split(' ').collect::<Vec<_>>());
    assert!(bench.read("run.yaml").contains("format_score: 0.1"));
    let short = [
        "train",
        "run.yaml",
        "warmup.sft.steps=2",
        "trainer.steps=1",
        "trainer.train_batch_size=4",
        "trainer.val_max_samples=4",
    ];
    run(&short);
    assert!(bench.path("runs/run/metrics.jsonl").exists());
}

#[test]
fn every_shell_gets_a_script_that_knows_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = succeeded(&firebrick(&["completions", shell]));
        for part in ["completions", "budget", "explain"] {
            assert!(script.contains(part), "{shell}: no {part}");
        }
    }
    refused(&firebrick(&["completions", "tcsh"]), &["bash"]);
}
