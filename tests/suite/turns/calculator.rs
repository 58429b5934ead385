//! The example in short: a run of the program that learns to call the calculator.

use crate::support::project;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The example with a smaller model and shorter numbers.
const SHORT: [&str; 11] = [
    "task.digits=2",
    "task.validation_size=20",
    "model.arch.hidden_size=64",
    "model.arch.intermediate_size=128",
    "model.arch.num_hidden_layers=2",
    "model.arch.num_attention_heads=2",
    "warmup.sft.steps=250",
    "warmup.sft.until_reward=0.4",
    "warmup.sft.batch_size=48",
    "trainer.steps=4",
    "trainer.train_batch_size=8",
];

fn run(folder: &Path, more: &[&str]) -> Vec<Value> {
    let mut command = Command::new(crate::program::program_path());
    let output = format!("output={}", folder.display());
    command.arg("train").arg(project().join("examples/calculator.yaml"));
    command.args(SHORT).args(more).arg(output).env_remove("FIREBRICK_LOG");
    let done = command.output().expect("the program");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    lines(&folder.join("metrics.jsonl"))
}

fn lines(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("a file");
    let lines = text.lines();
    lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn the_example_learns_to_call_its_tool_and_writes_down_the_turns() {
    let folder = tempfile::tempdir().expect("a folder");
    let metrics = run(&folder.path().join("run"), &[]);
    let last = metrics.last().expect("a step");
    assert!(last["tools/call_frequency"].as_f64().expect("calls") > 0.5, "{last}");
    assert_eq!(last["environment/template_mismatch"], 0.0, "{last}");
    assert_eq!(last["environment/lost"], 0.0);
    let samples = lines(&folder.path().join("run/samples.jsonl"));
    let called = samples.iter().filter(|s| s["num_turns"] == 2);
    let called: Vec<&Value> = called.collect();
    assert!(called.len() * 2 > samples.len(), "{} of {}", called.len(), samples.len());
    let mut right = 0;
    for sample in called {
        let turns = sample["turns"].as_array().expect("turns");
        let roles: Vec<&str> = turns.iter().filter_map(|m| m["role"].as_str()).collect();
        // one turn may call several tools
        let (last, before) = roles.split_last().expect("turns");
        assert_eq!((*last, before[0]), ("assistant", "assistant"));
        assert!(before.len() > 1 && before[1..].iter().all(|role| *role == "tool"));
        // rules judge the last turn alone
        let said = turns[before.len()]["content"].as_str().expect("text");
        let is_right = said.trim() == sample["answer"].as_str().expect("an answer");
        let ended = sample["finish"] == "stop";
        assert_eq!(sample["reward"] == 1.0, is_right && ended, "{sample}");
        right += usize::from(is_right);
    }
    assert!(right > 0, "none of the samples is right");
}

#[test]
fn limits_of_turns_without_an_environment_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut command = Command::new(crate::program::program_path());
    command.arg("train").arg(project().join("examples/calculator.yaml"));
    command.args(["task.tool=false", "rollout.multi_turn.max_assistant_turns=2"]);
    command.arg(format!("output={}", folder.path().join("run").display()));
    let done = command.output().expect("the program");
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{said}");
    assert!(said.contains("rollout.multi_turn limits the turns of an environment"), "{said}");
}
