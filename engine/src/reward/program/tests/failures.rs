//! Workers that die, hang or flood their output, and functions that raise or return what is no reward.

use super::super::{PendingScores, Progress};
use super::{Bench, LENGTHS, prompt, results, rewards, row};
use crate::reward::{Answer, CompletionId, Failure};
use serde_json::json;
use std::time::{Duration, Instant};

#[test]
fn a_completion_that_kills_its_judge_loses_its_reward_and_costs_the_others_nothing() {
    let Some(bench) = Bench::new(
        r#"
import os, sys
def f(completions, **kwargs):
    for c in completions:
        if c == "bad":
            print("about to die of", c, file=sys.stderr)
            os._exit(3)
    return [len(c) for c in completions]
"#,
    ) else {
        return;
    };
    for workers in [1, 3] {
        let program = bench.open("f", &json!({"workers": workers}));
        let outcomes = results(&program, &prompt(row("")), &["a", "bad", "ccc", "dd"]);
        let lost = outcomes[1].as_ref().expect_err("lost").to_string();
        assert!(lost.contains("its process ended (exit status: 3)"), "{lost}");
        assert!(lost.contains("about to die of bad"), "{lost}");
        let left: Vec<_> = outcomes.iter().flatten().map(|v| v.value).collect();
        assert_eq!(left, [Some(1.0), Some(3.0), Some(2.0)]);
        assert_eq!(rewards(&program, &["a", "bb", "ccc"]), LENGTHS);
    }
}

#[test]
fn a_function_that_raises_is_wrong_with_the_exception_and_the_line_of_the_users_code_and_not_asked_again() {
    let Some(bench) = Bench::new(
        r#"
import json, pathlib, sys
import helper
def calls():
    with open(pathlib.Path(__file__).parent / "calls", "a") as file:
        print("called", file=file)
class Mine(Exception):
    pass
def raises(completions, **kwargs):
    calls()
    return [{"a": 1.0, "cc": 2.0}[c] for c in completions]
def library(completions, **kwargs):
    calls()
    return [json.loads(c) for c in completions]
def module(completions, **kwargs):
    calls()
    return helper.scores(completions)
def exits(completions, **kwargs):
    calls()
    sys.exit("enough")
async def waits(completions, **kwargs):
    calls()
    raise Mine("late")
def rows(completions, log_metric, **kwargs):
    calls()
    log_metric("n", "many")
def imports(completions, **kwargs):
    calls()
    import no_such_module
class Scorer:
    def __call__(self, completions, **kwargs):
        calls()
        assert len(completions) == 1, "one at a time"
def numbers(solution_strs, ground_truths, **kwargs):
    calls()
    return [1 / (len(text) - 1) for text in solution_strs]
"#,
    ) else {
        return;
    };
    std::fs::write(bench.path("helper.py"), "def scores(texts):\n    return texts.scores()\n").expect("written");
    let cases = [
        ("raises", "raised KeyError: 'b' (", "rewards.py, line 11)"),
        ("library", "JSONDecodeError: Expecting value", "rewards.py, line 14)"),
        ("module", "raised AttributeError: 'list' object has no attribute 'scores' (", "helper.py, line 2)"),
        ("exits", "raised SystemExit: enough (", "rewards.py, line 20)"),
        ("waits", "raised rewards.Mine: late (", "rewards.py, line 23)"),
        ("rows", "raised ValueError: could not convert string to float: 'many' (", "rewards.py, line 26)"),
        ("imports", "raised ModuleNotFoundError: No module named 'no_such_module' (", "rewards.py, line 29)"),
        ("Scorer", "raised AssertionError: one at a time (", "rewards.py, line 33)"),
        ("numbers", "raised ZeroDivisionError: ", "rewards.py, line 36)"),
    ];
    for (count, (function, raised, place)) in (1..).zip(cases) {
        let outcomes = results(&bench.open(function, &json!({})), &prompt(row("")), &["a", "b", "cc"]);
        for outcome in outcomes {
            let Err(Failure::Misused(reason)) = outcome else { panic!("{function}: {outcome:?}") };
            for part in [&format!("`{function}` "), raised, place, " when called with 3 completions\nTraceback"] {
                assert!(reason.contains(part), "{function}: {part:?} is not in {reason}");
            }
            assert!(!reason.contains("<string>"), "frames of the worker: {reason}");
        }
        assert_eq!(bench.lines("calls").len(), count, "{function} is called once");
    }
}

#[test]
fn a_function_of_one_completion_that_raises_is_wrong_for_that_one_and_an_interrupt_is_not_its_fault() {
    let Some(bench) = Bench::new(
        r#"
import os, pathlib, signal
# the jobs of a shell in the background ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
def raises(data_source, solution_str, ground_truth, extra_info=None):
    return {"a": 1.0, "cc": 2.0}[solution_str]
async def waits(data_source, solution_str, ground_truth, extra_info=None):
    return {"a": 1.0, "cc": 2.0}[solution_str]
def interrupted(data_source, solution_str, ground_truth, extra_info=None):
    done = pathlib.Path(__file__).parent / "interrupted"
    if not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0
"#,
    ) else {
        return;
    };
    for (function, line) in [("raises", 6), ("waits", 8)] {
        let outcomes = results(&bench.open(function, &json!({})), &prompt(row("")), &["a", "b", "cc"]);
        let Err(Failure::Misused(reason)) = &outcomes[1] else { panic!("{function}: {outcomes:?}") };
        for part in [&format!("`{function}` raised KeyError: 'b' ("), &format!("rewards.py, line {line})")] {
            assert!(reason.contains(part.as_str()), "{part:?} is not in {reason}");
        }
        assert!(outcomes[0].is_ok() && outcomes[2].is_ok(), "{outcomes:?}");
    }
    let outcomes = results(&bench.open("interrupted", &json!({})), &prompt(row("")), &["a", "b"]);
    assert!(outcomes.iter().flatten().all(|score| score.value == Some(1.0) && score.repeated), "{outcomes:?}");
}

#[test]
fn what_a_function_reports_may_be_no_text() {
    let Some(bench) = Bench::new(
        "def half(completions, log_extra, **kwargs):\n    log_extra('x', ['\\ud800'] * len(completions))\n    \
         return [1.0] * len(completions)\n\
         def raises(completions, **kwargs):\n    raise ValueError('\\udfff')\n",
    ) else {
        return;
    };
    let outcomes = results(&bench.open("half", &json!({})), &prompt(row("")), &["a", "bb"]);
    assert!(outcomes.iter().all(|result| result.as_ref().is_ok_and(|score| score.extra["x"] == "?")), "{outcomes:?}");
    let outcomes = results(&bench.open("raises", &json!({})), &prompt(row("")), &["a", "bb"]);
    assert!(outcomes.iter().all(|result| matches!(result, Err(Failure::Misused(_)))), "{outcomes:?}");
}

#[test]
fn a_worker_that_fails_once_costs_no_reward() {
    let Some(bench) = Bench::new(
        r#"
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
def first(name):
    if (here / name).exists():
        return False
    (here / name).touch()
    return True
def dies(completions, **kwargs):
    if first("died"):
        os.abort()
    return [len(c) for c in completions]
def hangs(completions, **kwargs):
    if first("hung"):
        time.sleep(1000)
    return [len(c) for c in completions]
def floods(completions, **kwargs):
    for _ in range(20000):
        print("x" * 500)
        os.write(1, b'{"id": 0, "samples": []}\n')
    return [len(c) for c in completions]
"#,
    ) else {
        return;
    };
    for function in ["dies", "floods"] {
        let program = bench.open(function, &json!({}));
        let outcomes = results(&program, &prompt(row("")), &["a", "bb", "ccc"]);
        let judged: Vec<_> = outcomes.into_iter().map(|o| o.expect("judged")).collect();
        assert_eq!(judged.iter().map(|score| score.value).collect::<Vec<_>>(), LENGTHS, "{function}");
        // output of its own is no failure
        assert!(judged.iter().all(|score| score.repeated == (function == "dies")), "{function}");
        assert_eq!(rewards(&program, &["a", "bb", "ccc"]), LENGTHS, "{function}");
    }
    let started = Instant::now();
    let program = bench.open("hangs", &json!({"timeout": 2.0}));
    assert_eq!(rewards(&program, &["a", "bb", "ccc"]), LENGTHS);
    assert!(started.elapsed() > Duration::from_secs(2), "the deadline");
}

#[test]
fn a_function_that_returns_something_else_than_a_reward_each_is_wrong_for_all_and_not_asked_again() {
    let Some(bench) = Bench::new(
        r#"
import functools, pathlib
def calls():
    with open(pathlib.Path(__file__).parent / "calls", "a") as file:
        print("called", file=file)
def one(completions, **kwargs):
    calls()
    return [1.0]
def more(completions, **kwargs):
    calls()
    return [1.0] * (len(completions) + 1)
def none(completions, **kwargs):
    calls()
def number(completions, **kwargs):
    calls()
    return 0.5
def text(completions, **kwargs):
    calls()
    return "123"
def keyed(completions, **kwargs):
    calls()
    return {0: 1.0, 1: 1.0, 2: 1.0}
async def waits(completions, **kwargs):
    calls()
    return []
def logs(completions, log_extra, **kwargs):
    calls()
    log_extra("tries", [1])
    return [1.0] * len(completions)
wrapped = functools.partial(one)
"#,
    ) else {
        return;
    };
    let cases = [
        ("one", "`one` (", 6, "returned 1 rewards for 3 completions"),
        ("more", "`more` (", 9, "returned 4 rewards for 3 completions"),
        ("none", "`none` (", 12, "returned NoneType for 3 completions, expected a list of 3 rewards"),
        ("number", "`number` (", 14, "returned float for 3 completions, expected a list of 3 rewards"),
        ("text", "`text` (", 17, "returned str for 3"),
        ("keyed", "`keyed` (", 20, "returned dict for 3"),
        ("waits", "`waits` (", 23, "returned 0 rewards for 3 completions"),
        ("logs", "`logs` (", 26, "log_extra('tries') with 1 values for 3 completions"),
        ("wrapped", "`one` (", 6, "returned 1 rewards for 3 completions"),
    ];
    for (count, (function, name, line, part)) in (1..).zip(cases) {
        let outcomes = results(&bench.open(function, &json!({})), &prompt(row("")), &["a", "bb", "ccc"]);
        for outcome in outcomes {
            let Err(Failure::Misused(reason)) = outcome else { panic!("{function}: {outcome:?}") };
            for part in [name, "rewards.py", &format!("line {line})"), part] {
                assert!(reason.contains(part), "{function}: {part:?} is not in {reason}");
            }
        }
        assert_eq!(bench.lines("calls").len(), count, "{function} is called once");
    }
}

#[test]
fn a_value_that_is_no_reward_is_wrong_with_the_place_of_its_function_and_nan_does_not_apply() {
    let Some(bench) = Bench::new(
        r#"
VALUES = {"a": 1.0, "bb": float("nan"), "ccc": float("inf"), "dddd": "much", "eeeee": [1.0, 2.0]}
def group(completions, **kwargs):
    return [VALUES[c] for c in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return VALUES[solution_str]
def keyed(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": VALUES[solution_str]}
"#,
    ) else {
        return;
    };
    for (function, line) in [("group", 3), ("compute_score", 5), ("keyed", 7)] {
        let program = bench.open(function, &json!({}));
        let outcomes = results(&program, &prompt(row("42")), &["a", "bb", "ccc", "dddd", "eeeee"]);
        let [one, nan, infinite, text, list] = &outcomes[..] else { panic!("five: {outcomes:?}") };
        assert_eq!(one.as_ref().expect("judged").value, Some(1.0), "{function}");
        assert_eq!(nan.as_ref().expect("judged").value, None, "{function}");
        assert!(!one.as_ref().expect("judged").repeated, "{function}: its value costs the others no second call");
        for (outcome, value) in [(infinite, "inf"), (text, "'much'"), (list, "[1.0, 2.0]")] {
            let ((Err(Failure::Misused(reason)), "'much'" | "[1.0, 2.0]") | (Err(Failure::Infinite(reason)), "inf")) =
                (outcome, value)
            else {
                panic!("{function}: {outcome:?}")
            };
            for part in [function, "rewards.py", &format!("line {line})"), value] {
                assert!(reason.contains(part), "{function}: {part:?} is not in {reason}");
            }
        }
    }
}

#[test]
fn a_completion_that_hangs_is_given_up_at_the_deadline_with_all_that_its_judge_started() {
    let Some(bench) = Bench::new(
        r#"
import pathlib, subprocess, time
def f(completions, **kwargs):
    if "bad" in completions:
        child = subprocess.Popen(["sleep", "1000"])
        with open(pathlib.Path(__file__).parent / "children", "a") as file:
            print(child.pid, file=file)
        time.sleep(1000)
    return [len(c) for c in completions]
"#,
    ) else {
        return;
    };
    let program = bench.open("f", &json!({"timeout": 2.0}));
    let outcomes = results(&program, &prompt(row("")), &["a", "bad", "ccc"]);
    let lost = outcomes[1].as_ref().expect_err("lost").to_string();
    assert!(lost.contains("no answer within 2 s"), "{lost}");
    assert!(outcomes[0].is_ok() && outcomes[2].is_ok());
    let children = bench.lines("children");
    assert_eq!(children.len(), 2, "one of the group, one of the repetition");
    for child in &children {
        assert_ends(child);
    }
}

/// Waits for a process to be gone; a zombie is.
fn assert_ends(pid: &str) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let alive = || {
        let status = std::process::Command::new("ps").args(["-o", "stat=", "-p", pid]).output().expect("ps");
        let state = String::from_utf8_lossy(&status.stdout).trim().to_owned();
        !state.is_empty() && !state.starts_with('Z')
    };
    while alive() {
        assert!(Instant::now() < deadline, "process {pid} is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn workers_end_with_their_program_and_write_out_what_they_have_buffered() {
    let Some(bench) = Bench::new(
        r#"
import os, pathlib
log = open(pathlib.Path(__file__).parent / f"log{os.getpid()}", "w")
def f(completions, **kwargs):
    log.write(f"{os.getpid()}\n")
    return [len(c) for c in completions]
"#,
    ) else {
        return;
    };
    let program = bench.open("f", &json!({"workers": 2}));
    for _ in 0..4 {
        assert_eq!(rewards(&program, &["a", "bb", "ccc"]), LENGTHS);
    }
    drop(program);
    let files = std::fs::read_dir(bench.0.path()).expect("a folder");
    let names = files.map(|f| f.expect("a file").file_name().into_string().expect("a name"));
    let logs: Vec<String> = names.filter(|name| name.starts_with("log")).collect();
    assert!(!logs.is_empty());
    let calls: usize = logs.iter().map(|name| bench.lines(name).len()).sum();
    assert_eq!(calls, 4, "every call is in a log: {logs:?}");
    for name in &logs {
        assert_ends(name.trim_start_matches("log"));
    }
}

#[test]
fn no_reward_is_lost_or_doubled_among_many_groups_whose_judges_keep_failing() {
    let Some(bench) = Bench::new(
        r"
import os, random, signal
def f(completions, **kwargs):
    chance = random.random()
    if len(completions) > 1 and chance < 0.3:
        os._exit(1)
    if len(completions) > 1 and chance < 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(c) for c in completions]
",
    ) else {
        return;
    };
    let program = bench.open("f", &json!({"workers": 3}));
    let prompt = prompt(row(""));
    let groups: Vec<Vec<String>> =
        (0..24).map(|group| (0..4).map(|i| (group * 10 + i).to_string()).collect()).collect();
    let submit = |group: &Vec<String>| {
        let answers: Vec<Answer<'_>> = group
            .iter()
            .map(|text| Answer {
                prompt: &prompt,
                text: text.clone(),
                last_turn: None,
                turns: &[],
                environment: None,
                tokens: &[],
                finished: true,
                in_thought: false,
                id: CompletionId::default(),
            })
            .collect();
        program.submit(&answers, "rows", Progress::default()).expect("submitted")
    };
    let pending: Vec<_> = groups.iter().map(submit).collect();
    let results: Vec<_> = pending.into_iter().flat_map(PendingScores::wait).collect();
    let values = results.iter().map(|o| o.as_ref().expect("judged").value);
    let expected = groups.iter().flatten().map(|text| text.parse().ok());
    assert_eq!(values.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
}
