//! What a list of rewards says of completions: one `{"answer": …, "completion": …}` a line in, the reward, its parts
//! and what was read a line out.
//!
//! `cargo run --release --example grade -- '[{"kind": "math"}]' < pairs.jsonl`
#![allow(clippy::print_stdout, reason = "an example shows what it did")]

use firebrick::engine::task::{Completion, RewardConfig, Rewards};
use serde_json::{Value, json};
use std::error::Error;
use std::io::BufRead;

fn main() -> Result<(), Box<dyn Error>> {
    let list = std::env::args().nth(1);
    let list = list.ok_or("usage: grade REWARDS, a JSON list as in task.rewards")?;
    let configs: Vec<RewardConfig> = serde_json::from_str(&list)?;
    let rewards = Rewards::new(&configs)?;
    for line in std::io::stdin().lock().lines() {
        let pair: Value = serde_json::from_str(&line?)?;
        let text = |key: &str| pair[key].as_str().ok_or(format!("a line has no text `{key}`"));
        let completion = Completion {
            text: text("completion")?,
            tokens: &[],
            finished: true,
            max_tokens: usize::MAX,
            in_thought: false,
        };
        let said = match rewards.score(text("answer")?, &completion) {
            Ok(reward) => json!({
                "reward": reward.total,
                "parts": reward.parts,
                "readings": reward.readings,
            }),
            Err(error) => json!({"error": error.to_string()}),
        };
        println!("{said}");
    }
    Ok(())
}
