//! `firebrick config`, `new` and `completions`.

use super::{Bench, firebrick, program, refused, stderr, succeeded};
use crate::support::project;
use serde_json::Value;
use std::fs;
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
fn every_mistake_is_printed_with_its_line_and_the_exit_code_is_two() {
    let bench = Bench::new();
    let text = bench.read("config.yaml");
    let wrong =
        text.replace("rollout: {n: 4,", "rollout: {n: four,").replace("trainer: {steps: 3,", "trainer: {stepz: 3,");
    bench.write("config.yaml", &format!("{wrong}memory:\n  margin: 2\n"));
    let output = check(&bench, &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("3 mistakes"), "{}", stderr(&output));
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
        ("task={kind: jsonl, train: nowhere.jsonl, rewards: [{kind: exact}]}", "nowhere.jsonl"),
    ] {
        let output = check(&bench, &[setting]);
        assert_eq!(output.status.code(), Some(2), "{setting}");
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    refused(&firebrick(&["config", "check", "no/such.yaml"]), &["cannot read no/such.yaml"]);
}

/// A model of the fixtures.
fn fixture(name: &str) -> String {
    let folder = crate::support::fixtures().join("models").join(name);
    folder.to_string_lossy().into_owned()
}

/// The line that each mistake is shown at, and its message.
fn mistakes(output: &Output) -> Vec<(usize, String)> {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = said.lines().filter_map(|line| {
        let (_, rest) = line.split_once("config.yaml:")?;
        let (place, message) = rest.split_once(": ")?;
        let line = place.split(':').next()?.parse().unwrap_or(0);
        Some((line, message.to_owned()))
    });
    found.collect()
}

#[test]
fn models_files_fields_rewards_and_the_budget_are_looked_at_each_by_itself() {
    let bench = Bench::new();
    bench.write("rows.jsonl", "{\"question\": \"1+1=\", \"answer\": \"2\"}\n");
    let text = format!(
        "model:\n  path: {}\ntask:\n  kind: dataset\n  train: rows.jsonl\n  \
         validation: held_out.jsonl\n  messages:\n    - role: user\n      content: \"{{questoin}}\"\n  answer_field: anser\n  rewards:\n    \
         - kind: exact\n    - kind: regex\n      pattern: \"(\"\n    - kind: python\n      file: no.py\n      function: f\noutput: run\n\
         device: cpu\nwarmup:\n  sft:\n    train: demonstrations.jsonl\nmemory:\n  budget: 64KiB\n",
        fixture("qwen2-tied")
    );
    bench.write("config.yaml", &text);
    let output = check(&bench, &[]);
    let found = mistakes(&output);
    let expected = [
        (6, "held_out.jsonl"),
        (9, "no field `questoin`"),
        (10, "no field `anser`"),
        (14, "the regular expression \"(\""),
        (16, "no.py"),
        (22, "demonstrations.jsonl"),
        (24, "no plan fits"),
    ];
    let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, expected.map(|(line, _)| line), "{found:#?}");
    for ((_, message), (line, part)) in found.iter().zip(expected) {
        assert!(message.contains(part), "{line}: {part:?} is not in {message:?}");
    }
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in ["  14 |       pattern: \"(\"", "  24 |   budget: 64KiB"] {
        assert!(said.contains(line), "{line:?} is not in:\n{said}");
    }
    assert!(stderr(&output).contains("7 mistakes"), "{}", stderr(&output));
}

#[test]
fn files_are_looked_for_beside_mistakes_of_the_file_itself() {
    let bench = Bench::new();
    let text = "model:\n  path: no/such/model\ncritic:\n  model:\n    path: no/such/critic\nobjective: ppo\ntask:\n  kind: dataset\n  train: rows.jsonl\n  promt: \"{q}\"\n  rewards: [{kind: exact}]\n\
                output: run\nrollout: {n: four}\n";
    bench.write("config.yaml", text);
    let found = mistakes(&check(&bench, &[]));
    let expected = [
        (2, "no/such/model"),
        (5, "no/such/critic"),
        (9, "rows.jsonl"),
        (10, "unknown key `promt`"),
        (13, "rollout.n must be an integer"),
    ];
    let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, expected.map(|(line, _)| line), "{found:#?}");
    for ((_, message), (line, part)) in found.iter().zip(expected) {
        assert!(message.contains(part), "{line}: {part:?} is not in {message:?}");
    }
}

#[test]
fn what_is_no_yaml_is_shown_where_it_is_to_be_mended() {
    let bench = Bench::new();
    for (text, line, part) in [
        ("model:\n  path: [a, b\noutput: o\n", 2, "`[` is never closed"),
        ("output: a\nmodel: {path: m}\noutput: b\n", 3, "duplicate key `output`"),
    ] {
        bench.write("config.yaml", text);
        let found = mistakes(&check(&bench, &[]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].0 == line && found[0].1.contains(part), "{found:?}");
        assert!(!found[0].1.contains("Options"), "{found:?}");
        refused(&bench.firebrick("train", &[]), &[part, &format!("line {line}")]);
    }
}

#[test]
fn verls_and_trls_words_are_explained_by_the_key() {
    let said = succeeded(&firebrick(&["config", "explain", "num_generations"]));
    assert!(said.contains("TRL's word for rollout.n"), "{said}");
    assert!(said.contains("default  8"), "{said}");
}

#[test]
fn the_schema_is_json_and_an_explanation_names_what_others_call_a_key() {
    let schema: Value = serde_json::from_str(&succeeded(&firebrick(&["config", "schema"]))).unwrap();
    assert_eq!(schema["properties"]["rollout"]["properties"]["n"]["default"], 8);
    let said = succeeded(&firebrick(&["config", "explain", "rollout.n"]));
    for part in ["default  8", "num_generations", "docs/reference/configuration.md#rollout"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let all = succeeded(&firebrick(&["config", "explain"]));
    assert!(all.contains("  rollout "), "{all}");
    refused(&firebrick(&["config", "explain", "rolout.n"]), &["`rolout.n`", "rollout.n"]);
}

#[test]
fn a_new_configuration_has_no_mistakes_and_trains() {
    let bench = Bench::new();
    let new = |args: &[&str]| {
        let mut command = program(&[&["new"], args].concat());
        command.current_dir(bench.path("")).stdin(Stdio::null());
        command.output().unwrap()
    };
    let answers =
        ["--model", "tiny", "--data", "arithmetic", "--reward", "partial", "--memory", "1GiB", "--device", "cpu"];
    let said = succeeded(&new(&answers));
    assert!(said.contains("firebrick train run.yaml"), "{said}");
    refused(&new(&answers), &["run.yaml exists"]);
    let short = ["warmup=null", "trainer.steps=1", "trainer.train_batch_size=4", "trainer.val_max_samples=4"];
    let mut command = program(&[&["train", "run.yaml"], &short[..]].concat());
    succeeded(&command.current_dir(bench.path("")).output().unwrap());
    assert!(bench.path("runs/run/metrics.jsonl").exists());
    // what is not said has the questions' defaults, which are told
    let output = new(&["--memory", "2GiB", "--device", "cpu", "--output", "other.yaml"]);
    succeeded(&output);
    let taken = "taken without asking: --model tiny, --data arithmetic, --reward correct";
    assert!(stderr(&output).contains(taken), "{}", stderr(&output));
    let written = bench.read("other.yaml");
    assert!(written.contains("  budget: 2GiB\n"), "{written}");
    let model = fixture("qwen2-tied");
    let args = ["--model", &model, "--output", "third.yaml"];
    refused(&new(&args), &["without a terminal", "--data has no default"]);
    assert!(!bench.path("third.yaml").exists());
}

#[test]
fn an_example_is_written_as_it_is_and_has_no_mistakes() {
    let bench = Bench::new();
    for name in ["arithmetic", "calculator", "constrained", "memory_constrained_ppo", "ppo_arithmetic"] {
        let file = bench.path(&format!("{name}.yaml")).display().to_string();
        succeeded(&firebrick(&["new", "--example", name, "--output", &file]));
        let example = project().join(format!("examples/{name}.yaml"));
        assert_eq!(fs::read_to_string(&file).unwrap(), fs::read_to_string(example).unwrap());
        succeeded(&firebrick(&["config", "check", &file]));
    }
    refused(&firebrick(&["new", "--example", "chess"]), &["chess", "arithmetic"]);
    refused(&firebrick(&["new", "--example", "arithmetic", "--model", "tiny"]), &["cannot be used with"]);
}

#[test]
fn the_version_names_commit_and_features() {
    let said = succeeded(&firebrick(&["--version"]));
    for part in [env!("CARGO_PKG_VERSION"), "\ncommit: ", "\nfeatures: cpu"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert_eq!(said.contains(" cuda"), cfg!(feature = "cuda"), "{said}");
    assert_eq!(succeeded(&firebrick(&["-V"])).trim(), concat!("firebrick ", env!("CARGO_PKG_VERSION")));
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
