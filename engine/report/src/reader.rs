//! Answers that a task's grader reads in completions.

use super::excerpt::{Excerpt, ParsedAnswer};
use super::text::Text;
use firebrick_engine::task::{Rewards, TaskConfig};

/// Longest parsed answer and ground truth, in bytes.
pub const MAX_ANSWER_BYTES: usize = 400;

/// Reader of the answers that a task's grader compares with the ground truth.
pub enum AnswerReader {
    /// The whole completion, trimmed.
    Trimmed,
    /// The answers that rules read.
    Rules(Rewards),
    /// Unknown.
    None,
}

impl AnswerReader {
    /// The reader of a task; without a task, it reads nothing.
    pub fn new(task: Option<&TaskConfig>) -> Self {
        match task {
            Some(TaskConfig::Arithmetic(_) | TaskConfig::Calculator(_)) => Self::Trimmed,
            Some(TaskConfig::Dataset(config) | TaskConfig::Jsonl(config)) => {
                Rewards::new(&config.rewards).map_or(Self::None, Self::Rules)
            }
            // its runs write the answers
            Some(TaskConfig::Countdown(_)) | None => Self::None,
        }
    }

    /// The answers of a sample by the rule's name: those that the run wrote, or those in its completion.
    pub fn read(&self, sample: &Excerpt) -> Vec<(String, Option<Text>)> {
        let short = |text: &str| Text::new(text, MAX_ANSWER_BYTES);
        if !sample.readings.is_empty() {
            let answer = |reading: &ParsedAnswer| (reading.reward.clone(), reading.parsed.as_deref().map(short));
            return sample.readings.iter().map(answer).collect();
        }
        match self {
            Self::Trimmed => vec![("answer".into(), Some(short(sample.completion.trim())))],
            Self::Rules(rewards) => {
                let readings = rewards.readings(&sample.completion);
                readings.map(|(name, text)| (name.to_owned(), text.map(|text| short(&text)))).collect()
            }
            Self::None => Vec::new(),
        }
    }
}
