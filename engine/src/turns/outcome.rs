//! What came of rollouts over several turns.

use crate::data::Prompt;
use crate::task::Observation;
use firebrick_core::message::json;
use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

/// What an environment said to a turn.
pub(super) enum Played {
    /// Messages, after which the model has another turn.
    GoesOn(Observation),
    /// Nothing more; what the rollout was worth, where the environment says, and the object behind it, where it is
    /// looked at.
    Ended(Option<f64>, Option<Value>),
}

/// What came of a rollout beside its tokens.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Outcome {
    /// Its prompt where its environment began otherwise than the first of its group.
    #[serde(with = "firebrick_models::shared")]
    pub prompt: Option<Arc<Prompt>>,
    /// The messages after the prompt: the model's turns, and what stands between them.
    #[serde(with = "json")]
    pub turns: Vec<Message>,
    /// What its environment said that it was worth.
    pub reward: Option<f64>,
    /// How a reward function makes a copy of the object that its environment was, where one looks at it.
    #[serde(with = "json")]
    pub object: Option<Value>,
    /// Tool calls of the model.
    pub tool_calls: usize,
    /// Those of them that failed.
    pub failed_calls: usize,
    /// Times that it began again with a fresh environment.
    pub retries: usize,
    /// Why its environment failed for good: its group is not trained on.
    pub lost: Option<String>,
    /// Whether its tokens are other than what the chat template writes of the conversation.
    pub differs_from_template: bool,
}

impl Outcome {
    /// Forgets what was said, for another try.
    pub(super) fn restart(&mut self) {
        *self = Self { prompt: self.prompt.take(), retries: self.retries + 1, ..Self::default() };
    }
}

/// The outcomes of a step's rollouts in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct TurnStats {
    /// Rollouts.
    pub rollouts: usize,
    /// Tool calls.
    pub tool_calls: usize,
    /// Those that failed.
    pub failed_calls: usize,
    /// Times that a rollout began again with a fresh environment.
    pub retries: usize,
    /// Rollouts whose environment failed for good.
    pub lost: usize,
    /// Rollouts whose tokens are other than what the chat template writes.
    pub differ_from_template: usize,
}

impl TurnStats {
    /// Counts an outcome.
    pub fn add(&mut self, outcome: &Outcome) {
        self.rollouts += 1;
        self.tool_calls += outcome.tool_calls;
        self.failed_calls += outcome.failed_calls;
        self.retries += outcome.retries;
        self.lost += usize::from(outcome.lost.is_some());
        self.differ_from_template += usize::from(outcome.differs_from_template);
    }

    /// Adds those of other rollouts.
    pub fn absorb(&mut self, other: &Self) {
        self.rollouts += other.rollouts;
        self.tool_calls += other.tool_calls;
        self.failed_calls += other.failed_calls;
        self.retries += other.retries;
        self.lost += other.lost;
        self.differ_from_template += other.differ_from_template;
    }
}
