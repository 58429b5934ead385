//! What a task's grader reads in a completion, of runs that did not note it.

use super::text::Text;
use firebrick_engine::task::{Rewards, TaskConfig};

/// Bytes of what a rule read, and of a ground truth.
pub const LONGEST_ANSWER: usize = 400;

/// What a task's grader compares with the ground truth.
pub enum AnswerReader {
    /// The whole completion, trimmed.
    Trimmed,
    /// What rules read.
    Rules(Rewards),
    /// Unknown.
    None,
}

impl AnswerReader {
    /// The reader of a task; of none, one that reads nothing.
    pub fn new(task: Option<&TaskConfig>) -> Self {
        match task {
            Some(TaskConfig::Arithmetic(_) | TaskConfig::Calculator(_)) => Self::Trimmed,
            Some(TaskConfig::Dataset(config) | TaskConfig::Jsonl(config)) => {
                Rewards::new(&config.rewards).map_or(Self::None, Self::Rules)
            }
            // its runs note what was read
            Some(TaskConfig::Countdown(_)) | None => Self::None,
        }
    }

    /// What each rule that compares with the ground truth reads in a completion, by the rule's name.
    pub fn read(&self, completion: &str) -> Vec<(String, Option<Text>)> {
        let short = |text: &str| Text::new(text, LONGEST_ANSWER);
        match self {
            Self::Trimmed => vec![("answer".into(), Some(short(completion.trim())))],
            Self::Rules(rewards) => {
                let readings = rewards.readings(completion);
                readings.map(|(name, text)| (name.to_owned(), text.map(|text| short(&text)))).collect()
            }
            Self::None => Vec::new(),
        }
    }
}
