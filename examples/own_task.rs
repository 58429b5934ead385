//! A task and a reward of one's own: the model learns to write as many `=` as the digit in its prompt.
//!
//! `cargo run --release --example own_task -- output=runs/own_task`
#![allow(clippy::print_stdout, reason = "an example shows what it did")]

use firebrick::engine::config::parse;
use firebrick::engine::task::{Completion, Example, PromptText, Reward, Split, Task, TaskError};
use firebrick::engine::trainer::Trainer;

struct Count;

impl Task for Count {
    fn name(&self) -> &'static str {
        "count"
    }

    fn alphabet(&self) -> Option<&str> {
        Some("12345*=") // one token each; a model with a tokenizer of its own needs none
    }

    fn len(&self, split: Split) -> Option<u64> {
        (split == Split::Validation).then_some(5) // training is endless
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
        let equals = completion.text.matches('=').count();
        let others = completion.text.chars().count() - equals;
        let distance = equals.abs_diff(example.answer.len()) + others;
        Ok(Reward::single("count", -(distance as f64)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let overrides: Vec<String> = std::env::args().skip(1).collect();
    let config = parse(include_str!("own_task.yaml"), &overrides)?;
    let mut trainer = Trainer::builder(config).task(Count).build()?;
    let summary = trainer.run()?;
    println!("reward {:?} -> {:?}", summary.first, summary.last);
    Ok(())
}
