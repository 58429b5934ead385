//! Runs whose rewards other programs compute: what they add up to, and that a judge that misbehaves changes nothing but
//! what its own sample earns. Where there is no Python, these tests say so.

use super::runs::{metrics, weights};
use super::{Bench, firebrick, refused, stderr, succeeded};
use crate::support::{assert_close, checked, fixtures, project, report};
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The example's functions, and some that misbehave: once, or on one completion of step 2 alone.
const ROGUES: &str = r#"
import json, os, pathlib, time
here = pathlib.Path(__file__).parent
exec((here / "rewards.py").read_text())

def once(name):
    try:
        os.close(os.open(here / name, os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def digits_after_a_death(completions, **kwargs):
    if len(completions) > 1 and once("died"):
        os._exit(1)
    return digits(None, completions)

def digits_after_a_pause(completions, **kwargs):
    if len(completions) > 1 and once("hung"):
        time.sleep(1000)
    return digits(None, completions)

def digits_in_a_flood(completions, **kwargs):
    for _ in range(2000):
        print("noise " * 100)
    return digits(None, completions)

def digits_but_of_one(completions, completion_ids, trainer_state, **kwargs):
    bad = here / "bad"
    if trainer_state.global_step == 1 and once("chosen"):
        (here / "new").write_text(json.dumps(completion_ids[0]))
        os.replace(here / "new", bad)
    if bad.exists() and json.loads(bad.read_text()) in completion_ids:
        print("cannot judge this one")
        os._exit(4)
    return digits(None, completions)

def digits_dies(completions, **kwargs):
    os._exit(5)

def digits_until_step_two(completions, trainer_state, **kwargs):
    if trainer_state.global_step == 1:
        raise ValueError("out of order")
    return digits(None, completions)

def digits_once_wrong(completions, **kwargs):
    if once("wrong"):
        raise ValueError("out of order")
    return digits(None, completions)

def digits_for_ever(completions, **kwargs):
    (here / f"worker{os.getpid()}").touch()
    while True:
        pass
"#;

/// A folder with the functions; none, said aloud, where this machine has no Python.
fn bench() -> Option<Bench> {
    if Command::new("python3").arg("--version").output().is_err() {
        report("skipped: there is no python3 on this machine");
        return None;
    }
    let bench = Bench::new();
    let functions = std::fs::read_to_string(project().join("examples/rewards.py")).unwrap();
    bench.write("rewards.py", &functions);
    bench.write("rogues.py", ROGUES);
    Some(bench)
}

/// Arguments that run the example with one of the rogues in place of its first function.
fn arguments(bench: &Bench, command: &str, output: &str, function: &str) -> Vec<String> {
    let file = match function {
        "digits" => "rewards.py",
        _ => "rogues.py",
    };
    let example = project().join("examples/python_rewards.yaml");
    let model = fixtures().join("models/qwen2-tied");
    vec![
        command.to_owned(),
        example.display().to_string(),
        format!("output={}", bench.path(output).display()),
        format!("model.path={}", model.display()),
        format!("task.rewards.0.file={}", bench.path(file).display()),
        format!("task.rewards.0.function={function}"),
    ]
}

fn run(bench: &Bench, output: &str, function: &str, more: &[&str]) -> Output {
    let own = arguments(bench, "train", output, function);
    let own: Vec<&str> = own.iter().map(String::as_str).collect();
    firebrick(&[&own[..], more].concat())
}

fn samples(bench: &Bench, run: &str) -> Vec<Value> {
    let text = bench.read(&format!("{run}/samples.jsonl"));
    let lines = text.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// A part of a reward; none where it does not apply.
fn part(sample: &Value, name: &str) -> Option<f64> {
    let parts = sample["reward_parts"].as_array().unwrap();
    let own = parts.iter().find(|p| p[0] == name).expect("the part");
    own[1].as_f64()
}

#[test]
fn functions_for_trl_and_verl_are_two_of_the_rewards() {
    let Some(bench) = bench() else { return };
    succeeded(&run(&bench, "run", "digits", &[]));
    let (samples, lines) = (samples(&bench, "run"), metrics(&bench, "run"));
    let mut compared = 0;
    for sample in &samples {
        let text = sample["completion"].as_str().unwrap();
        assert_eq!(part(sample, "digits").is_some(), !text.is_empty());
        // what a digit is, Python and Rust agree on here
        let other_numbers = |c: char| c.is_numeric() && !c.is_ascii();
        if let Some(share) = part(sample, "digits").filter(|_| !text.contains(other_numbers)) {
            let digits = text.chars().filter(char::is_ascii_digit).count() as f64;
            let length = text.chars().count() as f64;
            assert_close("digits", share, digits / length, 1e-9);
            compared += 1;
        }
        let has_number = text.chars().any(|c| c.is_ascii_digit());
        assert_eq!(sample["reward_extra"]["right/has_number"], has_number, "{text:?}");
        let sum = 0.5 * part(sample, "digits").unwrap_or(0.0)
            + part(sample, "right").expect("applies")
            + 0.1 * part(sample, "length").expect("applies");
        assert_close("reward", sample["reward"].as_f64().unwrap(), sum, 1e-9);
    }
    checked("rewards by Python", compared);
    let text = bench.read("run/metrics.jsonl");
    for line in text.lines().skip(1) {
        assert!(line.contains("\"timing_s/reward_wait\""), "{line}");
    }
    for line in &lines[1..] {
        for name in ["reward/digits/mean", "reward/right/has_number/mean", "reward/lost"] {
            assert!(line[name].is_number(), "{name}: {line}");
        }
    }
    assert!(lines[0]["val-core/jsonl/reward"].is_number());
    let eval = arguments(&bench, "eval", "run", "digits");
    let eval: Vec<&str> = eval.iter().map(String::as_str).collect();
    let printed = succeeded(&firebrick(&[&eval[..], &["--json"]].concat()));
    let found: Value = serde_json::from_str(&printed).unwrap();
    let before = lines[0]["val-core/jsonl/reward"].as_f64().unwrap();
    assert_close("eval", found["reward"].as_f64().unwrap(), before, 1e-9);
}

#[test]
fn a_judge_that_dies_hangs_or_floods_its_output_once_changes_nothing() {
    let Some(bench) = bench() else { return };
    succeeded(&run(&bench, "plain", "digits", &[]));
    for function in ["after_a_death", "after_a_pause", "in_a_flood"] {
        let function = format!("digits_{function}");
        let more = ["task.rewards.0.timeout=5"];
        let output = run(&bench, &function, &function, &more);
        succeeded(&output);
        let again = stderr(&output).contains("which are scored again one by one: ");
        assert_eq!(again, function != "digits_in_a_flood", "{function}: {}", stderr(&output));
        assert_eq!(samples(&bench, &function), samples(&bench, "plain"), "{function}");
        let others = |run: &str| {
            let mut lines = metrics(&bench, run);
            for line in &mut lines {
                line.as_object_mut().unwrap().remove("reward/repeated");
            }
            lines
        };
        assert_eq!(others(&function), others("plain"), "{function}");
        assert!(weights(&bench, &function, 3) == weights(&bench, "plain", 3), "{function}: other weights");
    }
}

#[test]
fn a_completion_that_cannot_be_judged_leaves_its_group_out_and_says_why() {
    let Some(bench) = bench() else { return };
    let output = run(&bench, "run", "digits_but_of_one", &["trainer.test_freq=0"]);
    succeeded(&output);
    let all = samples(&bench, "run");
    assert_eq!(all.len(), 3 * 4 * 4, "every sample is written once");
    let lost: Vec<&Value> = all.iter().filter(|s| !s["reward_error"].is_null()).collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    let lost = lost[0];
    assert_eq!(lost["step"], 2);
    let reason = lost["reward_error"].as_str().unwrap();
    for part in ["reward `digits`", "exit status: 4", "cannot judge this one"] {
        assert!(reason.contains(part), "{reason}");
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
    assert_eq!(part(lost, "digits"), None);
    let of_group = |s: &&Value| s["step"] == 2 && s["draw"] == lost["draw"];
    let group: Vec<&Value> = all.iter().filter(of_group).collect();
    assert_eq!(group.len(), 4);
    for sample in group {
        assert_eq!(sample["advantage"], 0.0, "the group is not trained on");
    }
    let line = &metrics(&bench, "run")[2];
    assert_eq!(line["reward/lost"], 1.0);
    assert_eq!(line["rollout/left_out_groups"], 1.0);
}

#[test]
fn a_function_that_judges_nothing_ends_the_run_and_one_that_cannot_be_used_begins_none() {
    let Some(bench) = bench() else { return };
    let output = run(&bench, "run", "digits_dies", &["trainer.val_max_samples=0"]);
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    for part in ["reward failed at step", "has all its rewards", "exit status: 5"] {
        assert!(message.contains(part), "{message}");
    }
    refused(&run(&bench, "none", "no_such_function", &[]), &["reward `digits`", "no function `no_such_function`"]);
    refused(
        &run(&bench, "none", "digits", &["task.rewards.0.python=no-such-python"]),
        &["reward `digits`", "no-such-python", "set `python`"],
    );
    assert!(!bench.path("none").exists());
}

#[test]
fn a_function_that_raises_ends_the_run_as_a_users_error_with_its_line_and_the_row_and_keeps_the_checkpoint() {
    let Some(bench) = bench() else { return };
    let more = ["trainer.val_max_samples=0", "trainer.save_freq=1"];
    let output = run(&bench, "run", "digits_until_step_two", &more);
    let line = 1 + ROGUES.lines().position(|line| line.contains("out of order")).unwrap();
    refused(
        &output,
        &[
            "reward failed at step 2, draw ",
            " (train row ",
            "), sample 0: reward `digits`: `digits_until_step_two` raised ValueError: out of order (",
            &format!("rogues.py, line {line}) when called with 4 completions"),
            "Traceback",
            "  prompt: ",
        ],
    );
    assert!(!stderr(&output).contains("again"), "{}", stderr(&output));
    assert!(bench.path("run/checkpoints/step-000001").is_dir());
    assert_eq!(bench.read("run/metrics.jsonl").lines().count(), 2, "no second step");
    // the checkpoint continues once the function works
    std::fs::copy(bench.path("rogues.py"), bench.path("kept.py")).unwrap();
    let fixed = ROGUES.replace("trainer_state.global_step == 1", "False");
    bench.write("rogues.py", &fixed);
    succeeded(&run(
        &bench,
        "run",
        "digits_until_step_two",
        &[&more[..], &["--resume", "--allow-changed-inputs"]].concat(),
    ));
}

#[test]
fn a_function_that_raises_once_is_not_asked_again_in_training_validation_or_evaluation() {
    let Some(bench) = bench() else { return };
    let raised = ["reward failed at step ", "`digits_once_wrong` raised ValueError: out of order ("];
    let again = || std::fs::remove_file(bench.path("wrong")).unwrap();
    refused(&run(&bench, "train", "digits_once_wrong", &["trainer.val_max_samples=0"]), &raised);
    again();
    let validated = run(&bench, "validation", "digits_once_wrong", &[]);
    refused(&validated, &[&raised[..], &["step 0, ", " (validation row "]].concat());
    again();
    let eval = arguments(&bench, "eval", "run", "digits_once_wrong");
    let eval: Vec<&str> = eval.iter().map(String::as_str).collect();
    refused(&firebrick(&eval), &[&raised[..], &["step 0, ", " (validation row "]].concat());
}

#[test]
fn completions_that_are_scored_again_are_counted() {
    let Some(bench) = bench() else { return };
    let more = ["trainer.val_max_samples=0", "trainer.test_freq=0"];
    succeeded(&run(&bench, "run", "digits_after_a_death", &more));
    let repeated = |line: &Value| line["reward/repeated"].as_f64().unwrap_or(0.0);
    let counts: Vec<f64> = metrics(&bench, "run").iter().map(repeated).collect();
    assert_eq!(counts.iter().sum::<f64>() as usize, 4, "{counts:?}");
}

#[test]
fn a_trainer_that_is_killed_leaves_no_worker_behind() {
    let Some(bench) = bench() else { return };
    let more = ["trainer.val_max_samples=0".to_owned()];
    let arguments = arguments(&bench, "train", "run", "digits_for_ever");
    let mut trainer = Command::new(super::program_path())
        .args(arguments.iter().chain(&more))
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_mins(2);
    let workers = || -> Vec<String> {
        let files = std::fs::read_dir(bench.path(".")).unwrap();
        let names = files.map(|f| f.unwrap().file_name().into_string().unwrap());
        names.filter_map(|n| n.strip_prefix("worker").map(str::to_owned)).collect()
    };
    while workers().is_empty() {
        assert!(Instant::now() < deadline, "no worker was asked");
        assert!(trainer.try_wait().unwrap().is_none(), "the run ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    trainer.kill().unwrap();
    trainer.wait().unwrap();
    for worker in workers() {
        let alive = || {
            let state = Command::new("ps").args(["-o", "stat=", "-p", &worker]).output();
            let state = state.unwrap().stdout;
            !state.is_empty() && !state.starts_with(b"Z")
        };
        while alive() {
            assert!(Instant::now() < deadline, "worker {worker} is still there");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
