//! A completion to be judged, and what the task's rules say of it.

use crate::data::Prompt;
use crate::task::{Completion, Reward, Task, TaskError};
use crate::{Error, Result};
use firebrick_models::tokenizer::Message;
use serde_json::Value;

/// A completion to be scored.
#[derive(Clone, Debug)]
pub struct Answer<'a> {
    /// Its prompt.
    pub prompt: &'a Prompt,
    /// Its text, without special tokens; of several turns all of it.
    pub text: String,
    /// The text of its last turn, which rules judge, where there are several.
    pub last_turn: Option<String>,
    /// The messages that it is made of, where it had an environment.
    pub turns: &'a [Message],
    /// How a reward function makes a copy of the object that its environment was, where there is one.
    pub environment: Option<&'a Value>,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Whether it ended by itself.
    pub finished: bool,
    /// Whether it, or its last turn, ends inside a thought.
    pub in_thought: bool,
    /// Which sample it is, for messages.
    pub id: CompletionId,
}

/// Which sample a reward belongs to, for messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompletionId {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub prompt_index: u64,
    /// Index of the completion in its group.
    pub sample: usize,
}

/// Which of a task's rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Those that training maximises.
    Training,
    /// Those that validation reports.
    Validation,
}

impl Answer<'_> {
    /// What the task's rules say of it.
    ///
    /// # Errors
    /// `Error::Reward` where the task cannot judge it, with prompt and completion.
    pub fn by_rules(&self, task: &dyn Task, max_tokens: usize, purpose: Purpose) -> Result<Reward> {
        let completion = Completion {
            text: self.last_turn.as_deref().unwrap_or(&self.text),
            tokens: self.tokens,
            finished: self.finished,
            max_tokens,
            in_thought: self.in_thought,
        };
        let example = &self.prompt.example;
        self.checked(match purpose {
            Purpose::Training => task.reward(example, &completion),
            Purpose::Validation => task.validation_reward(example, &completion),
        })
    }

    /// The error that it cannot be judged, for a reason.
    pub(crate) fn failed(&self, reason: String) -> Error {
        self.error(reason, false)
    }

    /// The error that the user's code raised, or returned what is no reward.
    pub(crate) fn misjudged(&self, reason: String) -> Error {
        self.error(reason, true)
    }

    fn error(&self, reason: String, users: bool) -> Error {
        Error::Reward {
            step: self.id.step,
            prompt_index: self.id.prompt_index,
            row: self.prompt.row,
            sample: self.id.sample,
            users,
            prompt: self.prompt.text.clone(),
            completion: self.text.clone(),
            reason,
        }
    }

    /// A reward that failed, or that is no number, comes back with its sample.
    fn checked(&self, reward: Result<Reward, TaskError>) -> Result<Reward> {
        match reward {
            Ok(reward) if reward.total.is_finite() => Ok(reward),
            Ok(reward) => Err(self.failed(format!("the reward is {}; rewards must be finite", reward.total))),
            Err(e) => Err(self.failed(e.to_string())),
        }
    }
}
