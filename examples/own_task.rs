//! A task and a reward of one's own: the model learns to write as many `=` as the digit in its prompt.
//!
//! `cargo run --release --example own_task -- runs/own_task`
#![allow(clippy::print_stdout, reason = "an example shows what it did")]

use firebrick::prelude::*;

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
        Ok(Example::text(format!("{count}*"), "=".repeat(count)))
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let equals = completion.text.matches('=').count();
        let others = completion.text.chars().count() - equals;
        let distance = equals.abs_diff(example.answer.len()) + others;
        Ok(Reward::single("count", -(distance as f64)))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let output = std::env::args().nth(1);
    let mut config = RunConfig::builder()
        .model_arch([
            ("model_type", "llama".into()),
            ("hidden_size", 64.into()),
            ("intermediate_size", 128.into()),
            ("num_hidden_layers", 2.into()),
            ("num_attention_heads", 4.into()),
            ("max_position_embeddings", 32.into()),
        ])
        .output(output.as_deref().unwrap_or("runs/own_task"))
        .device(DeviceSpec::CPU)
        .build()?;
    config.rollout.n = 16;
    config.rollout.prompt_length = 4;
    config.rollout.response_length = 8;
    config.optim.lr = 2e-3;
    config.trainer.steps = 60;
    config.trainer.train_batch_size = 10;
    config.trainer.seed = 3;

    let mut trainer = Trainer::builder(config).task(Count).build()?;
    let summary = trainer.run()?;
    println!("reward {:?} -> {:?}", summary.first, summary.last);
    Ok(())
}
