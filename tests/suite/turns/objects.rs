//! Reward functions of TRL's signature that look at the objects of a task's environments. Where there is no Python,
//! these tests say so.

use super::python::{folder_with, template};
use super::samples;
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::task::{EnvironmentConfig, Environments, Example, PythonEnvironments};
use firebrick_engine::trainer::Trainer;
use serde_json::{Value, json};
use std::path::Path;

const CLASSES: &str = r#"
import os, pathlib, threading

class Kept:
    def __init__(self, scale=1):
        self.scale = scale

    def reset(self, **row):
        self.total = self.scale * row["row"]
        self.told = []

    def add(self, amount: int) -> str:
        """Adds.

        Args:
            amount: How much.
        """
        self.told.append(amount)
        return "added"

class Dies(Kept):
    """Its process dies as it is copied, the first time."""

    def __reduce__(self):
        done = pathlib.Path(__file__).with_name("died")
        if not done.exists():
            done.touch()
            os._exit(3)
        return super().__reduce__()

class Locked(Kept):
    def reset(self, **row):
        super().reset(**row)
        self.lock = threading.Lock()

def beside(environments, **kwargs):
    assert all(isinstance(own, Kept) for own in environments)
    return [float(own.total) for own in environments]
"#;

const FUNCTIONS: &str = r#"
def apart(completions, row, environments):
    assert [own.total for own in environments] == [10 * one for one in row]
    return [own.total + len(own.told) for own in environments]

def optional(completions, environments=None):
    return [0.0 if environments is None else 1.0] * len(completions)

def by_keyword(completions, **kwargs):
    return [float(own.total) for own in kwargs["environments"]]

def without(completions, **kwargs):
    return [2.0 + sum(name.startswith("environ") for name in kwargs)] * len(completions)
"#;

fn folder() -> Option<tempfile::TempDir> {
    folder_with(&[("env.py", CLASSES), ("judge.py", FUNCTIONS)])
}

#[test]
fn a_reward_function_looks_at_the_environments_of_its_completions() {
    looked_at("Kept");
}

#[test]
fn a_process_that_dies_as_its_environments_are_copied_costs_no_rollout() {
    looked_at("Dies");
}

/// A run whose rewards look at environments of a class, in a folder.
fn run(folder: &Path, class: &str) -> firebrick::Result<()> {
    let rows: Vec<String> = (0..8)
        .map(|row| {
            let prompt = json!([{"role": "user", "content": "ab"}]);
            json!({"prompt": prompt, "row": row}).to_string()
        })
        .collect();
    std::fs::write(folder.join("rows.jsonl"), rows.join("\n")).expect("written");
    let file = |name: &str| folder.join(name).display().to_string();
    let function = |of: &str, name: &str| json!({"kind": "python", "name": name, "file": file(of), "function": name});
    let rewards = json!([
        function("judge.py", "apart"),
        function("env.py", "beside"),
        function("judge.py", "optional"),
        function("judge.py", "by_keyword"),
        function("judge.py", "without"),
    ]);
    let environment = json!({"kind": "python", "file": file("env.py"), "class": class, "kwargs": {"scale": 10}});
    let model = crate::support::fixtures().join("models/qwen2-tied");
    let config = json!({
        "model": {"path": model, "chat_template": template(folder)},
        "output": file("run"),
        "device": "cpu",
        "task": {"kind": "dataset", "train": file("rows.jsonl"), "environment": environment, "rewards": rewards},
        "rollout": {"n": 2, "prompt_length": 200, "response_length": 8},
        "trainer": {"steps": 2, "train_batch_size": 2, "test_freq": 0, "save_freq": -1},
    });
    let config: RunConfig = parse(&config.to_string(), &[]).expect("a configuration");
    let mut trainer = Trainer::builder(config).build().expect("a trainer");
    trainer.run().map(drop)
}

fn looked_at(class: &str) {
    let Some(folder) = folder() else { return };
    run(folder.path(), class).expect("a run");
    let mut seen = 0;
    for line in samples(&folder.path().join("run")).lines() {
        let sample: Value = serde_json::from_str(line).expect("JSON");
        let parts = &sample["reward_parts"];
        let total = parts[0][1].as_f64().expect("a number");
        assert!(total % 10.0 == 0.0, "{parts}");
        let expected =
            json!([["apart", total], ["beside", total], ["optional", 1.0], ["by_keyword", total], ["without", 2.0]]);
        assert_eq!(*parts, expected);
        seen += 1;
    }
    assert_eq!(seen, 8);
    assert_eq!(folder.path().join("died").exists(), class == "Dies");
}

#[test]
fn an_object_that_cannot_be_copied_ends_the_run_with_the_function_that_needs_it() {
    let Some(folder) = folder() else { return };
    let error = run(folder.path(), "Locked").expect_err("an end");
    let message = error.to_string();
    assert!(error.is_user_error(), "{message}");
    for part in ["reward `apart`: `apart` (", "judge.py, line 2): ", "an object of `Locked` cannot be pickled"] {
        assert!(message.contains(part), "{part:?} is not in {message}");
    }
}

#[test]
fn an_object_that_cannot_be_copied_says_why() {
    let Some(folder) = folder() else { return };
    for (class, copied) in [("Kept", true), ("Locked", false)] {
        let file = folder.path().join("env.py");
        let config = json!({"kind": "python", "file": file, "class": class});
        let EnvironmentConfig::Python(config) = serde_json::from_value(config).expect("settings");
        let environments = PythonEnvironments::open(&config).expect("opened");
        let ended = || {
            let example = Example {
                fields: json!({"row": 3}).as_object().cloned().expect("an object").into(),
                ..Example::text("", "")
            };
            let mut own = environments.make(0);
            own.reset(&example).expect("reset");
            assert_eq!(own.reward().expect("nothing"), None);
            own.object().expect("its process is there")
        };
        assert_eq!(ended(), None, "nobody wants it");
        assert!(environments.keep_objects());
        let object = ended().expect("an object");
        let error = object["error"].as_str();
        assert_eq!(error.is_none(), copied, "{object}");
        let says = |why: &str| why.contains("`Locked` cannot be pickled") && why.contains("lock");
        assert!(error.is_none_or(says), "{object}");
    }
}
