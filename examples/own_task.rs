//! A task and a reward of one's own: the model learns to write as many `=` as the digit in its prompt.
//!
//! `cargo run --release --example own_task -- runs/own_task`
#![allow(clippy::print_stdout, reason = "an example shows what it did")]

use firebrick::engine::config::parse;
use firebrick::engine::task::{Completion, Example, PromptText, Reward, Split, Task, TaskError};
use firebrick::engine::trainer::{Silent, Start, Trainer};
use firebrick::engine::trainer_state::Mode;
use std::sync::Arc;

struct Count;

impl Task for Count {
    fn name(&self) -> &'static str {
        "count"
    }

    fn len(&self, split: Split) -> Option<u64> {
        // training is endless, and five prompts are enough to validate on
        (split == Split::Validation).then_some(5)
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        let count = index as usize % 5 + 1;
        Ok(Example {
            prompt: PromptText::Text(format!("{count}*")),
            answer: "=".repeat(count),
            solution: None,
            fields: serde_json::Map::new(),
        })
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let found = completion
            .text
            .matches('=')
            .count()
            .abs_diff(example.answer.len());
        let noise = completion.text.chars().filter(|&c| c != '=').count();
        Ok(Reward::single("count", -((found + noise) as f64)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let output = std::env::args()
        .nth(1)
        .unwrap_or_else(|| "runs/own_task".into());
    let mut config = parse(include_str!("own_task.yaml"), &[format!("output={output}")])?;
    config.device = "cpu".parse()?;
    let mut trainer = Trainer::with_task(
        config,
        Arc::new(Count),
        Mode::Rl,
        Start::Fresh,
        Box::new(Silent),
    )?;
    let summary = trainer.run()?;
    println!("reward {:?} -> {:?}", summary.first, summary.last);
    Ok(())
}
