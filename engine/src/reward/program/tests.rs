//! Scores of programs, and failures of programs. Tests that need Python report it if there is none.

mod commands;
mod failures;
mod files;

use super::{Program, ProgramResult, Progress};
use crate::data::Prompt;
use crate::reward::{Answer, CompletionId};
use crate::task::{
    Calculator, CalculatorConfig, Completion, Example, PromptText, Reward, RewardConfig, RewardKind, RewardProgram,
    Split, Task, TaskError,
};
use firebrick_models::tokenizer::Message;
use serde_json::{Value, json};
use std::path::PathBuf;

/// A task of rows alone.
struct Rows(Vec<Example>);

impl Task for Rows {
    fn name(&self) -> &'static str {
        "rows"
    }

    fn len(&self, split: Split) -> Option<u64> {
        Some(match split {
            Split::Train => self.0.len() as u64,
            Split::Validation => 0,
        })
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        Ok(self.0[index as usize].clone())
    }

    fn reward(&self, _: &Example, _: &Completion<'_>) -> Result<Reward, TaskError> {
        Ok(Reward::default())
    }
}

/// A folder with a file of functions.
struct Bench(tempfile::TempDir);

impl Bench {
    /// None, said aloud, where this machine has no Python.
    #[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
    fn new(functions: &str) -> Option<Self> {
        let python = std::process::Command::new("python3").arg("--version").output();
        if python.is_err() {
            eprintln!("skipped: there is no python3 on this machine");
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("rewards.py"), functions).expect("written");
        Some(Self(dir))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn settings(&self, function: &str, more: &Value) -> RewardProgram {
        let mut settings = json!({
            "kind": "python", "file": self.path("rewards.py"), "function": function, "workers": 1,
            // more than a slow machine needs for any of these functions
            "timeout": 30.0,
        });
        let more = more.as_object().expect("settings").clone();
        settings.as_object_mut().expect("settings").extend(more);
        program(settings)
    }

    fn open(&self, function: &str, more: &Value) -> Program {
        let settings = self.settings(function, more);
        Program::open("judge", &settings, &Rows(vec![row("")])).expect("opens")
    }

    fn refused(&self, function: &str, more: &Value) -> String {
        let settings = self.settings(function, more);
        let opened = Program::open("judge", &settings, &Rows(vec![row("")]));
        opened.expect_err("refused").to_string()
    }

    /// Lines of a file that functions write.
    fn lines(&self, name: &str) -> Vec<String> {
        let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }
}

fn program(settings: Value) -> RewardProgram {
    let config: RewardConfig = serde_json::from_value(settings).expect("settings");
    match config.kind {
        RewardKind::Python(config) => RewardProgram::Python(config),
        RewardKind::Command(config) => RewardProgram::Command(config),
        other => panic!("{other:?}"),
    }
}

/// An example in the columns of verl and TRL.
fn row(answer: &str) -> Example {
    let fields = json!({
        "prompt": "p", "target": answer, "data_source": "sums",
        "reward_model": {"ground_truth": [answer, 7]}, "extra_info": {"index": 3},
    });
    let Value::Object(fields) = fields else { unreachable!() };
    Example { fields: fields.into(), ..Example::text("p", "") }
}

fn prompt(example: Example) -> Prompt {
    Prompt { example, text: "p".to_owned(), tokens: vec![1], row: Some((Split::Train, 2)) }
}

/// Results of a program for completions of one prompt.
fn results(program: &Program, prompt: &Prompt, texts: &[&str]) -> Vec<ProgramResult> {
    let tokens: Vec<u32> = (0..8).collect();
    let answers: Vec<Answer<'_>> = texts
        .iter()
        .enumerate()
        .map(|(sample, text)| Answer {
            prompt,
            text: (*text).to_owned(),
            last_turn: None,
            turns: &[],
            environment: None,
            tokens: &tokens[..text.len().min(8)],
            finished: true,
            in_thought: false,
            id: CompletionId { sample, ..CompletionId::default() },
        })
        .collect();
    let progress = Progress { global_step: 4, max_steps: 9, epoch: 0.5 };
    program.submit(&answers, "rows", progress).expect("submitted").wait()
}

/// The rewards of completions, all of which must have been judged.
fn rewards(program: &Program, texts: &[&str]) -> Vec<Option<f64>> {
    let outcomes = results(program, &prompt(row("42")), texts);
    let judged = outcomes.into_iter();
    judged.map(|o| o.expect("judged").value).collect()
}

const LENGTHS: [Option<f64>; 3] = [Some(1.0), Some(2.0), Some(3.0)];

#[test]
fn a_function_for_trl_is_called_as_trl_calls_it() {
    let Some(bench) = Bench::new(
        r#"
import asyncio
def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    print("prints do not mix with answers")
    assert prompts == ["p"] * 3, prompts
    assert completion_ids == [[0], [0, 1], [0, 1, 2]], completion_ids
    assert (trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch) == (4, 9, 0.5)
    assert sorted(columns) == ["data_source", "extra_info", "reward_model", "target"], sorted(columns)
    assert columns["target"] == ["42"] * 3
    log_extra("shouted", [c.upper() for c in completions])
    log_metric("calls", 1)
    log_metric("calls", 2)
    return [None if len(c) == 2 else len(c) for c in completions]
async def waits(completions, target, bonus=0):
    await asyncio.sleep(0.01)
    return [float(c == t) + bonus for c, t in zip(completions, target)]
def chat(prompts, completions):
    assert prompts[0] == [{"role": "user", "content": "hello"}], prompts
    return [len(c[0]["content"]) if c[0]["role"] == "assistant" else -1 for c in completions]
"#,
    ) else {
        return;
    };
    let outcomes = results(&bench.open("everything", &json!({})), &prompt(row("42")), &["a", "bb", "ccc"]);
    let judged: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    let values: Vec<Option<f64>> = judged.iter().map(|score| score.value).collect();
    assert_eq!(values, [Some(1.0), None, Some(3.0)]);
    assert_eq!(Value::Object(judged[1].extra.clone()), json!({"shouted": "BB", "calls": 1.5}));
    let waits = bench.open("waits", &json!({"kwargs": {"bonus": 0.5}}));
    assert_eq!(rewards(&waits, &["42", "7"]), [Some(1.5), Some(0.5)]);
    let turn = Message::new("user", "hello");
    let chat = Example { prompt: PromptText::Chat(vec![turn]), ..row("42") };
    let outcomes = results(&bench.open("chat", &json!({})), &prompt(chat), &["four", "x"]);
    let values = outcomes.into_iter().map(|o| o.unwrap().value);
    assert_eq!(values.collect::<Vec<_>>(), [Some(4.0), Some(1.0)]);
}

#[test]
fn a_function_for_verl_is_called_as_verl_calls_it() {
    let Some(bench) = Bench::new(
        r#"
import asyncio
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # the ground truth as the row has it, not as text
    assert (data_source, ground_truth) == ("sums", ["42", 7])
    # what verl's reward managers add: the prompt and the completion are two turns
    assert extra_info == {"index": 3, "num_turns": 2, "rollout_reward_scores": {}}, extra_info
    if solution_str == "none":
        return None
    if solution_str == "plain":
        return 0.25
    right = solution_str == ground_truth[0]
    return {"score": 1.0 if right else 0.0, "acc": right, "pred": solution_str, "nan": float("nan")}
running = 0
async def together(data_source, solution_str, ground_truth, extra_info=None):
    global running
    running += 1
    await asyncio.sleep(0.05)
    return running
"#,
    ) else {
        return;
    };
    let outcomes = results(&bench.open("compute_score", &json!({})), &prompt(row("42")), &["42", "plain", "none", "7"]);
    let judged: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
    let values: Vec<Option<f64>> = judged.iter().map(|score| score.value).collect();
    assert_eq!(values, [Some(1.0), Some(0.25), None, Some(0.0)]);
    assert_eq!(Value::Object(judged[3].extra.clone()), json!({"acc": false, "pred": "7", "nan": null}));
    let together = bench.open("together", &json!({}));
    assert_eq!(
        rewards(&together, &["a", "b", "c"]),
        [Some(3.0); 3],
        "all calls of a coroutine function run at the same time"
    );
}

#[test]
fn a_function_that_needs_objects_is_refused_where_environments_are_none() {
    let Some(bench) = Bench::new(
        r#"
def needs(completions, environments):
    return [environment.total for environment in environments]
def takes(completions, environments=(), **kwargs):
    assert environments is None
    return [len(c) for c in completions]
def any_of_them(completions, **kwargs):
    assert "environments" not in kwargs
    return [len(c) for c in completions]
"#,
    ) else {
        return;
    };
    let calculator: CalculatorConfig = serde_json::from_value(json!({})).expect("settings");
    let calculator = Calculator::new(&calculator).expect("a task");
    let open = |function: &str| {
        let settings = bench.settings(function, &json!({}));
        Program::open("judge", &settings, &calculator)
    };
    let refused = open("needs").expect_err("refused").to_string();
    for part in ["reward `judge`", "it needs `environments`", "not objects"] {
        assert!(refused.contains(part), "{part:?} is not in {refused}");
    }
    for function in ["takes", "any_of_them"] {
        let program = open(function).expect("opened");
        assert_eq!(rewards(&program, &["a", "bb", "ccc"]), LENGTHS, "{function}");
    }
    // without an environment there are no objects to be missed, as in TRL
    let outcomes = results(&bench.open("takes", &json!({})), &prompt(row("")), &["a", "bb", "ccc"]);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    bench.open("needs", &json!({}));
}

#[test]
fn a_function_that_cannot_be_used_is_refused_with_the_reason() {
    let Some(bench) = Bench::new(
        "def f(completions, colour):\n    return []\ndef g(x, y):\n    return 0\n\
         def compute_score(data_source, solution_str, ground_truth, tokenizer):\n    return 0\n\
         def v(data_source, solution_str, ground_truth):\n    return 0\n",
    ) else {
        return;
    };
    let refused = |function, more: Value, part: &str| {
        let message = bench.refused(function, &more);
        assert!(message.contains("reward `judge`"), "{message}");
        assert!(message.contains(part), "{part:?} is not in {message}");
    };
    refused("f", json!({"python": "no-such-python"}), "set `python`");
    refused("f", json!({"file": "/no/such.py"}), "there is no file");
    refused("h", json!({}), "no function `h` in it; its functions are `f`, `g`");
    refused("g", json!({}), "its parameters are `x`, `y`; expected TRL's");
    refused("compute_score", json!({}), "it needs `tokenizer`");
    refused("f", json!({}), "it needs `colour`, which is not a column of the train rows");
    refused("v", json!({"kwargs": {"w": 1}}), "`kwargs` names `w`");
    let settings = bench.settings("v", &json!({}));
    let bare = Rows(vec![row("42"), Example::text("p", "")]);
    let message = Program::open("judge", &settings, &bare).expect_err("refused");
    assert!(message.to_string().contains("train example 1: it compares"), "{message}");
    std::fs::write(bench.path("rewards.py"), "import no_such_module\n").expect("written");
    refused("f", json!({}), "No module named 'no_such_module'");
    refused("f", json!({}), "rewards.py\", line 1");
    std::fs::write(bench.path("rewards.py"), "import os\nos._exit(7)\n").expect("written");
    refused("f", json!({}), "its process ended (exit status: 7)");
}

#[test]
fn functions_get_the_numbers_that_python_reads_in_the_row() {
    let Some(bench) = Bench::new(
        r#"
import math
def check(big, minus, large, price, gone, far, nested):
    assert (big, minus, large) == (12345678901234567890123, 0, 1000.0), (big, minus, large)
    assert type(big) is int and type(minus) is int and type(large) is float
    assert price == 1.5 and math.isnan(gone) and far == [-math.inf, 1e-05], (price, gone, far)
    assert nested == {"n": 9007199254740993}, nested
    return 1.0
def trl(completions, big, minus, large, price, gone, far, nested, **columns):
    return [check(big[0], minus[0], large[0], price[0], gone[0], far[0], nested[0])] * len(completions)
def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert ground_truth == 12345678901234567890123 and type(ground_truth) is int, ground_truth
    del extra_info["num_turns"], extra_info["rollout_reward_scores"]
    return check(**extra_info)
"#,
    ) else {
        return;
    };
    let numbers = r#""big":12345678901234567890123,"minus":-0,"large":1E3,"price":1.50,"gone":NaN,"far":[-Infinity,1e-05],
        "nested":{"n":9007199254740993}"#;
    let text = format!(
        r#"{{{numbers},"reward_model":{{"ground_truth":12345678901234567890123}},"extra_info":{{{numbers}}}}}"#
    );
    let Ok(Value::Object(fields)) = firebrick_spec::json::parse(text.as_bytes()) else { panic!("{text}") };
    let example = Example { fields: fields.into(), ..Example::text("p", "12345678901234567890123") };
    let task = Rows(vec![example.clone()]);
    for function in ["trl", "verl"] {
        let program = Program::open("judge", &bench.settings(function, &json!({})), &task).expect("opens");
        let outcomes = results(&program, &prompt(example.clone()), &["a"]);
        assert_eq!(outcomes.into_iter().map(|o| o.unwrap().value).collect::<Vec<_>>(), [Some(1.0)], "{function}");
    }
}
