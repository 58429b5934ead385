//! Environments that draw their tasks, with and without rows. Where there is no Python, these tests say so.

use super::python::{folder_with, template};
use super::samples;
use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::trainer::Trainer;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

const CLASSES: &str = r#"
import random, secrets

class Seeded:
    def reset(self, **row):
        # as TRL passes it where there is no dataset
        assert row["prompt"] == [{"role": "user", "content": ""}], row
        self.goal = random.randint(100, 999)
        return f"Count to {self.goal}."

    def add(self) -> str:
        """Adds one."""
        return "1"

    def get_reward(self) -> float:
        return float(self.goal)

class Unseeded(Seeded):
    def reset(self, **row):
        super().reset(**row)
        self.goal = 100 + secrets.randbelow(900)
        return f"Count to {self.goal}."

def same(prompts, completions, environments, **kwargs):
    assert all(str(own.goal) in asked[-1]["content"] for own, asked in zip(environments, prompts))
    return [0.0] * len(completions)
"#;

/// What a run of a class without rows writes of its samples.
fn run(folder: &Path, name: &str, class: &str) -> Vec<Value> {
    let text = format!(
        "model: {{path: {}, chat_template: {}}}\noutput: {}\ndevice: cpu\n\
         task:\n  kind: dataset\n  environment: {{kind: python, file: {file}, class: {class}}}\n  \
         rewards: [{{kind: python, file: {file}, function: same}}]\n\
         rollout: {{n: 4, prompt_length: 200, response_length: 4}}\n\
         trainer: {{steps: 2, train_batch_size: 2, test_freq: 0, save_freq: -1}}\n",
        crate::support::fixtures().join("models/qwen2-tied").display(),
        template(folder).display(),
        folder.join(name).display(),
        file = folder.join("env.py").display(),
    );
    let config: RunConfig = parse(&text, &[]).expect("a configuration");
    Trainer::builder(config).build().expect("a trainer").run().expect("a run");
    let lines = samples(&folder.join(name));
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn an_environment_without_rows_draws_the_task_of_each_group_and_a_run_repeats() {
    let Some(folder) = folder_with(&[("env.py", CLASSES)]) else { return };
    let all = run(folder.path(), "run", "Seeded");
    assert_eq!(all.len(), 16);
    let mut prompts = BTreeSet::new();
    for group in all.chunks(4) {
        let prompt = group[0]["prompt"].as_str().expect("a prompt");
        for sample in group {
            assert_eq!(sample["prompt"], prompt);
            assert!(
                prompt.contains(&format!("Count to {}.", sample["reward"].as_f64().expect("a number"))),
                "{sample}"
            );
        }
        prompts.insert(prompt.to_owned());
    }
    assert_eq!(prompts.len(), 4, "each draw has another task: {prompts:?}");
    assert_eq!(run(folder.path(), "again", "Seeded"), all);
}

#[test]
fn a_rollout_whose_environment_begins_otherwise_than_its_group_has_its_own_prompt() {
    let Some(folder) = folder_with(&[("env.py", CLASSES)]) else { return };
    let all = run(folder.path(), "run", "Unseeded");
    assert_eq!(all.len(), 16);
    for sample in &all {
        assert!(sample["reward_error"].is_null(), "{sample}");
        let prompt = sample["prompt"].as_str().expect("a prompt");
        assert!(prompt.contains(&format!("Count to {}.", sample["reward"].as_f64().expect("a number"))), "{sample}");
    }
    let prompts: BTreeSet<&str> = all.iter().filter_map(|sample| sample["prompt"].as_str()).collect();
    assert!(prompts.len() > 8, "{prompts:?}");
}

#[test]
fn rows_may_only_be_omitted_with_an_environment() {
    let text = "model: {path: m}\noutput: o\ndevice: cpu\ntask: {kind: dataset, rewards: [{kind: exact}]}\n";
    let config: RunConfig = parse(text, &[]).expect("a configuration");
    let refused = config.task.expect("a task").build(Path::new(".")).err().expect("refused").to_string();
    assert!(refused.contains("task.train") && refused.contains("environment"), "{refused}");
}
