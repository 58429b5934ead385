//! Python classes of TRL's shape as environments: what they say, and what they may do wrong. Where there is no Python,
//! these tests say so.

use super::{metrics, samples};
use crate::support::report;
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::task::{
    Environment, EnvironmentConfig, Environments, Example, PythonEnvironmentConfig, PythonEnvironments, TaskError,
    ToolCall, ToolParser, Turn,
};
use firebrick_engine::trainer::Trainer;
use firebrick_models::tokenizer::Message;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const CLASSES: &str = r#"
import os, pathlib, stat, sys, time
from typing import Literal, Optional

here = pathlib.Path(__file__).parent

def on_the_wire(line):
    """Writes to every pipe that this process has, the one for its answers among them."""
    for number in range(3, 32):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, line)
        except OSError:
            pass

class Counter:
    """Counts."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, **row) -> str | None:
        self.total = self.start
        self.row = row
        print("reset")
        return row.get("hint")

    def add(self, amount: int, times: int = 1, sign: Literal["+", "-"] = "+", note: Optional[str] = None) -> str:
        """
        Adds to the counter.

        Args:
            amount: How much to add,
                each time.
            times: How often.
            sign: Which way.
            note: Why.

        Returns:
            The new total.
        """
        if amount == 13:
            raise ValueError("not thirteen")
        if amount == 99:
            os._exit(3)
        if amount == 98:
            time.sleep(1000)
        if amount == 97:
            on_the_wire(b"nonsense\n")
        if amount == 96:
            on_the_wire(b'{"id": 4711, "results": [{"content": "forged"}]}\n')
        if amount == 95:
            on_the_wire(b"\xff\xfe\n")
        if amount == 94:
            on_the_wire(b'{"results": []}\n')
        if amount == 93:
            while True:
                on_the_wire(b"flood\n")
        if amount == 92:
            for _ in range(20_000):
                print("noise " * 80)
                print("noise " * 80, file=sys.stderr)
            os.write(1, b"not the wire\n")
        if amount == 91:
            return "long " * 100_000
        self.total += (amount if sign == "+" else -amount) * times
        return f"total {self.total}"

    async def peek(self) -> dict:
        """Tells the total."""
        return {"total": self.total}

    def get_reward(self) -> float:
        return float(self.total)

    def _hidden(self):
        pass

class NoReset:
    pass

class NoHints:
    def reset(self, **row): pass
    def tool(self, x):
        """Does.

        Args:
            x: What.
        """

class NoDoc:
    def reset(self, **row): pass
    def tool(self, x: int): pass

class Undescribed:
    def reset(self, **row): pass
    def tool(self, x: int):
        """Does."""

class Raises(Counter):
    def reset(self, **row):
        raise RuntimeError("cannot begin")

class Wrong:
    def reset(self, **row):
        return 3

class Unmade:
    made = 0
    def __init__(self):
        Unmade.made += 1
        if Unmade.made > 1:
            raise TypeError("no second one")
    def reset(self, **row): pass

class NoNumber(Counter):
    def get_reward(self):
        return 'high'

class Infinite:
    def reset(self, **row): pass
    def get_reward(self):
        return float("inf")

class Unpaid(Counter):
    def get_reward(self):
        return self.no_such_attribute

class DiesOnce(Counter):
    def reset(self, **row):
        died = here / "died"
        if not died.exists():
            died.touch()
            os._exit(3)
        return super().reset(**row)
"#;

/// A folder with the classes.
fn folder() -> Option<tempfile::TempDir> {
    folder_with(&[("env.py", CLASSES)])
}

/// A folder with files; none, said aloud, where this machine has no Python.
pub(super) fn folder_with(files: &[(&str, &str)]) -> Option<tempfile::TempDir> {
    if Command::new("python3").arg("--version").output().is_err() {
        report("skipped: there is no python3 on this machine");
        return None;
    }
    let folder = tempfile::tempdir().expect("a folder");
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).expect("written");
    }
    Some(folder)
}

fn config(folder: &Path, class: &str, more: &Value) -> PythonEnvironmentConfig {
    let mut config = json!({"kind": "python", "file": folder.join("env.py"), "class": class});
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    let EnvironmentConfig::Python(config) = serde_json::from_value(config).expect("settings");
    config
}

fn open(folder: &Path, class: &str, more: &Value) -> Result<PythonEnvironments, TaskError> {
    PythonEnvironments::open(&config(folder, class, more))
}

fn example(row: &Value) -> Example {
    Example { fields: row.as_object().cloned().unwrap_or_default().into(), ..Example::text("", "") }
}

fn turn(calls: &[(&str, Value)]) -> Turn {
    let call = |(name, arguments): &(&str, Value)| {
        Ok(ToolCall { name: (*name).to_owned(), arguments: arguments.as_object().cloned().unwrap_or_default() })
    };
    Turn { text: String::new(), calls: calls.iter().map(call).collect() }
}

fn began(environments: &PythonEnvironments, worker: usize) -> Box<dyn Environment> {
    let mut environment = environments.make(worker);
    let said = environment.reset(&example(&json!({"hint": "start at 5", "tools": []})));
    assert_eq!(said.expect("begun").as_deref(), Some("start at 5"));
    environment
}

fn said(environment: &mut Box<dyn Environment>, calls: &[(&str, Value)]) -> Vec<String> {
    let observation = environment.step(&turn(calls)).expect("an answer");
    assert!(observation.messages.iter().all(|m| m.role() == "tool"));
    observation.messages.into_iter().map(|m| m.text().into_owned()).collect()
}

#[test]
fn methods_with_types_and_docstrings_are_the_tools() {
    let Some(folder) = folder() else { return };
    let environments = open(folder.path(), "Counter", &Value::Null).expect("opened");
    // as transformers 5's `get_json_schema` writes it
    let add = json!({"type": "function", "function": {
        "name": "add", "description": "Adds to the counter.",
        "parameters": {"type": "object", "properties": {
            "amount": {"type": "integer", "description": "How much to add, each time."},
            "times": {"type": "integer", "description": "How often."},
            "sign": {"type": "string", "enum": ["+", "-"], "description": "Which way."},
            "note": {"type": "string", "nullable": true, "description": "Why."}
        }, "required": ["amount"]},
        "return": {"type": "string", "description": "The new total."}
    }});
    let tools = environments.tools().as_array().expect("a list");
    let names: Vec<&Value> = tools.iter().map(|tool| &tool["function"]["name"]).collect();
    assert_eq!(names, ["add", "peek"]);
    assert_eq!(tools[0], add);
    assert!(environments.has_reward() && environments.adds_to_prompts());
}

#[test]
fn an_object_of_the_class_answers_each_rollout_for_itself() {
    let Some(folder) = folder() else { return };
    let more = json!({"kwargs": {"start": 5}});
    let environments = open(folder.path(), "Counter", &more).expect("opened");
    let (mut one, mut other) = (began(&environments, 0), began(&environments, 0));
    assert_eq!(said(&mut one, &[("add", json!({"amount": 2, "times": 3}))]), ["total 11"]);
    let calls = [("add", json!({"amount": 1, "sign": "-"})), ("peek", json!({}))];
    assert_eq!(said(&mut other, &calls), ["total 4", "{'total': 4}"]);
    // what a tool refuses, the model is told
    let refused = [
        ("add", json!({"amount": 13})),
        ("subtract", json!({})),
        ("_hidden", json!({})),
        ("add", json!({"amounts": 1})),
    ];
    let observation = one.step(&turn(&refused)).expect("an answer");
    assert_eq!(observation.failed_calls, 4);
    let told: Vec<_> = observation.messages.iter().map(Message::text).collect();
    assert_eq!(told[0], r#"{"error":"not thirteen"}"#);
    assert!(told[1].contains("there is no tool 'subtract'; there are add, peek"), "{}", told[1]);
    assert!(told[2].contains("there is no tool '_hidden'"), "{}", told[2]);
    assert!(told[3].contains("unexpected keyword argument 'amounts'"), "{}", told[3]);
    assert_eq!(one.reward().expect("a reward"), Some(11.0));
    assert_eq!(other.reward().expect("a reward"), Some(4.0));
    assert!(one.step(&turn(&[])).expect("an answer").messages.is_empty());
}

#[test]
fn an_integer_of_any_length_reaches_a_tool_as_it_is_written() {
    let Some(folder) = folder() else { return };
    let environments = open(folder.path(), "Counter", &Value::Null).expect("opened");
    let mut environment = began(&environments, 0);
    let call = r#"<tool_call>{"name": "add", "arguments": {"amount": 98765432109876543210}}</tool_call>"#;
    let calls = ToolParser::Hermes.parse(call, environments.tools());
    let observation = environment.step(&Turn { text: call.to_owned(), calls }).expect("an answer");
    assert_eq!(observation.messages[0].text(), "total 98765432109876543210");
    assert_eq!(observation.messages[0].fields()["name"], "add");
}

#[test]
fn a_process_that_dies_or_hangs_is_replaced() {
    let Some(folder) = folder() else { return };
    let more = json!({"timeout": 5.0});
    let environments = open(folder.path(), "Counter", &more).expect("opened");
    for (amount, reason) in [(99, "its process ended"), (98, "no answer within 5 s")] {
        let (mut one, mut other) = (began(&environments, 0), began(&environments, 0));
        let mut apart = began(&environments, 1);
        let failed = one.step(&turn(&[("add", json!({"amount": amount}))]));
        let failed = failed.expect_err("it failed");
        assert!(failed.own && failed.reason.contains(reason), "{failed}");
        // the one beside it is gone too, through no fault of its own; one of another process is not
        let gone = other.step(&turn(&[("peek", json!({}))])).expect_err("gone");
        assert!(!gone.own, "{gone}");
        assert_eq!(said(&mut apart, &[("add", json!({"amount": 1}))]), ["total 1"]);
        let mut again = began(&environments, 0);
        assert_eq!(said(&mut again, &[("add", json!({"amount": 1}))]), ["total 1"]);
    }
}

#[test]
fn a_process_that_writes_nonsense_on_the_wire_is_replaced() {
    let Some(folder) = folder() else { return };
    let more = json!({"timeout": 20.0, "workers": 1});
    let environments = open(folder.path(), "Counter", &more).expect("opened");
    for (amount, reason) in [
        (97, "it answered \"nonsense"),
        (96, "it answered \"{\\\"id\\\": 4711"),
        (95, "not UTF-8"),
        (94, "it answered \"{\\\"results\\\": []"),
        (93, "it answered \"flood"),
    ] {
        let (mut one, mut other) = (began(&environments, 0), began(&environments, 0));
        let failed = one.step(&turn(&[("add", json!({"amount": amount}))]));
        let failed = failed.expect_err("it failed");
        assert!(failed.own && failed.reason.contains(reason), "{failed}");
        let gone = other.step(&turn(&[("peek", json!({}))])).expect_err("gone");
        assert!(!gone.own, "{gone}");
        let mut again = began(&environments, 0);
        assert_eq!(said(&mut again, &[("add", json!({"amount": 1}))]), ["total 1"]);
    }
}

#[test]
fn what_an_environment_prints_disturbs_nothing_however_much_it_is() {
    let Some(folder) = folder() else { return };
    let environments = open(folder.path(), "Counter", &Value::Null).expect("opened");
    let mut one = began(&environments, 0);
    assert_eq!(said(&mut one, &[("add", json!({"amount": 92}))]), ["total 92"]);
    let long = said(&mut one, &[("add", json!({"amount": 91}))]);
    assert_eq!(long, ["long ".repeat(100_000)]);
    assert_eq!(one.reward().expect("a reward"), Some(92.0));
}

#[test]
fn modules_of_the_folder_that_a_class_imports_are_named_at_once_or_at_its_first_call() {
    let class = "import json, near\nclass Late:\n    def reset(self, **row):\n        import late\n";
    let files = [("env.py", class), ("near.py", ""), ("late.py", ""), ("apart.py", "")];
    let Some(folder) = folder_with(&files) else { return };
    let environments = open(folder.path(), "Late", &Value::Null).expect("opened");
    let at = |name: &str| folder.path().join(name);
    assert_eq!(environments.modules(), [at("near.py")]);
    environments.make(0).reset(&example(&json!({}))).expect("begun");
    assert_eq!(environments.modules(), [at("late.py"), at("near.py")]);
}

#[test]
fn classes_that_are_no_environments_are_refused_with_the_reason() {
    let Some(folder) = folder() else { return };
    for (class, part) in [
        ("Missing", "there is no class `Missing` in it; its classes are `Counter`"),
        ("NoReset", "no method `reset(**row)`"),
        ("NoHints", "the parameter `x` of the tool `tool` has no type hint"),
        ("NoDoc", "the tool `tool` has no docstring"),
        ("Undescribed", "does not describe `x`"),
    ] {
        let found = open(folder.path(), class, &Value::Null).expect_err(class).to_string();
        assert!(found.contains(part), "{found}");
    }
    let mut missing = config(folder.path(), "Counter", &Value::Null);
    missing.file = PathBuf::from("nowhere.py");
    let found = PythonEnvironments::open(&missing).expect_err("no file").to_string();
    assert!(found.contains("there is no file nowhere.py"), "{found}");
    for (key, value) in [("workers", json!(0)), ("timeout", json!(-1.0))] {
        let wrong = open(folder.path(), "Counter", &json!({key: value})).expect_err(key);
        assert!(wrong.to_string().contains(key), "{wrong}");
    }
}

#[test]
fn code_that_raises_or_returns_what_it_may_not_is_named_with_its_line() {
    let Some(folder) = folder() else { return };
    let line = |code: &str| 1 + CLASSES.lines().position(|line| line.contains(code)).expect(code);
    let cases = [
        ("Raises", "`Raises.reset` raised RuntimeError: cannot begin (", line("cannot begin")),
        ("Wrong", "`Wrong.reset` (", line("return 3") - 1),
        ("Unmade", "`Unmade` raised TypeError: no second one (", line("no second one")),
        ("NoNumber", "`NoNumber.get_reward` (", line("return 'high'") - 1),
        ("Infinite", "`Infinite.get_reward` (", line("inf") - 1),
        ("Unpaid", "`Unpaid.get_reward` raised AttributeError: ", line("no_such_attribute")),
    ];
    for (class, part, line) in cases {
        let environments = open(folder.path(), class, &Value::Null).expect("opened");
        let mut environment = environments.make(0);
        let begun = environment.reset(&example(&json!({})));
        let failed = begun.and_then(|_| environment.reward()).expect_err(class);
        assert!(failed.of_code && failed.reason.contains(part), "{failed}");
        assert!(failed.reason.contains(&format!("env.py, line {line})")), "{line}: {failed}");
    }
}

#[test]
fn a_run_whose_environment_raises_ends_with_its_line_and_the_row_and_one_that_dies_is_tried_again_with_a_warning() {
    let Some(folder) = folder() else { return };
    let rows: Vec<String> =
        (0..4).map(|_| json!({"prompt": [{"role": "user", "content": "ab"}]}).to_string()).collect();
    std::fs::write(folder.path().join("rows.jsonl"), rows.join("\n")).expect("written");
    let run = |class: &str| {
        let text = format!(
            "model: {{path: {}, chat_template: {}}}\noutput: {}\ndevice: cpu\n\
             task:\n  kind: dataset\n  train: {}\n  environment: {{kind: python, file: {}, class: {class}}}\n  rewards: [{{kind: length, target: 4}}]\n\
             rollout: {{n: 2, prompt_length: 200, response_length: 8}}\n\
             trainer: {{steps: 1, train_batch_size: 2, test_freq: 0, save_freq: -1}}\n",
            crate::support::fixtures().join("models/qwen2-tied").display(),
            template(folder.path()).display(),
            folder.path().join(class).display(),
            folder.path().join("rows.jsonl").display(),
            folder.path().join("env.py").display(),
        );
        let config: RunConfig = parse(&text, &[]).expect("a configuration");
        Trainer::builder(config).build().expect("a trainer").run().map(drop)
    };
    for (class, part) in [
        ("Raises", "`Raises.reset` raised RuntimeError: cannot begin ("),
        ("Unpaid", "`Unpaid.get_reward` raised AttributeError: "),
        ("NoNumber", "returned 'high', which is no reward"),
    ] {
        let error = run(class).expect_err(class);
        let message = error.to_string();
        assert!(error.is_user_error(), "{message}");
        for part in ["environment failed at step 1, draw ", " (train row ", "), sample ", part, "env.py, line "] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
    run("DiesOnce").expect("a run");
}

/// Rows of files whose environment is a class: what a random model says has no calls, so its rollouts are one turn and
/// its reward.
#[test]
fn rows_with_a_class_are_a_task() {
    let Some(folder) = folder() else { return };
    let rows: Vec<String> = (0..8)
        .map(|row| {
            let prompt = json!([{"role": "user", "content": "ab"}]);
            json!({"prompt": prompt, "hint": " b", "row": row}).to_string()
        })
        .collect();
    std::fs::write(folder.path().join("rows.jsonl"), rows.join("\n")).expect("written");
    let text = format!(
        "model: {{path: {}, chat_template: {}}}\noutput: {}\ndevice: cpu\n\
         task:\n  kind: dataset\n  train: {}\n  environment: {{kind: python, file: {}, class: Counter, kwargs: {{start: 5}}}}\n  rewards: []\n\
         rollout: {{n: 2, prompt_length: 200, response_length: 8}}\n\
         trainer: {{steps: 2, train_batch_size: 2, test_freq: 0, save_freq: -1}}\n",
        crate::support::fixtures().join("models/qwen2-tied").display(),
        template(folder.path()).display(),
        folder.path().join("run").display(),
        folder.path().join("rows.jsonl").display(),
        folder.path().join("env.py").display(),
    );
    let config: RunConfig = parse(&text, &[]).expect("a configuration");
    Trainer::builder(config).build().expect("a trainer").run().expect("a run");
    for line in samples(&folder.path().join("run")).lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(sample["reward"], 5.0, "{sample}");
        assert_eq!(sample["reward_parts"], json!([["environment", 5.0]]));
        let prompt = sample["prompt"].as_str().expect("a prompt");
        assert!(prompt.contains("ab b"), "{prompt}");
        assert!(prompt.contains("Adds to the counter."), "{prompt}");
    }
    let lines = metrics(&folder.path().join("run"));
    assert_eq!(lines[1]["num_turns/mean"], 1.0);
}

/// A template for the fixture's model, whose turns end with its end token.
pub(super) fn template(folder: &Path) -> PathBuf {
    let path = folder.join("template.jinja");
    let text = "{{ tools[0].function.description }}{%- for m in messages -%}{{ '\\n' + m.role + ': ' + m.content }}\
        {%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}\
        {%- if add_generation_prompt -%}{{ '\\nassistant: ' }}{%- endif -%}";
    std::fs::write(&path, text).expect("written");
    path
}
