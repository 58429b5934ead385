//! Outcomes of multi-turn rollouts.

use crate::data::Prompt;
use crate::task::Observation;
use firebrick_core::message::json;
use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;

/// An environment's reply to a turn.
pub(super) enum Reply {
    /// Messages, after which the model has another turn.
    Messages(Observation),
    /// The end, with the rollout's reward, if any, and the recipe of the environment's object, if a reward function
    /// reads it.
    End(Option<f64>, Option<Value>),
}

/// Outcome of a rollout besides its tokens.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Outcome {
    /// Its prompt, if its environment's first text differs from that of the group.
    #[serde(with = "firebrick_models::shared")]
    pub prompt: Option<Arc<Prompt>>,
    /// Messages after the prompt.
    #[serde(with = "json")]
    pub turns: Vec<Message>,
    /// Reward by its environment.
    pub reward: Option<f64>,
    /// Recipe by which a reward function copies the environment's object, if one reads it.
    #[serde(with = "json")]
    pub object: Option<Value>,
    /// Tool calls of the model.
    pub tool_calls: usize,
    /// Failed tool calls.
    pub failed_calls: usize,
    /// Restarts with a fresh environment.
    pub retries: usize,
    /// Final error of its environment, which excludes its group from training.
    pub lost: Option<String>,
    /// True if its tokens differ from the chat template's text of the conversation.
    pub differs_from_template: bool,
}

impl Outcome {
    /// Resets it for another try.
    pub(super) fn restart(&mut self) {
        *self = Self { prompt: self.prompt.take(), retries: self.retries + 1, ..Self::default() };
    }
}

/// Statistics of a step's outcomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct TurnStats {
    /// Rollouts.
    pub rollouts: usize,
    /// Tool calls.
    pub tool_calls: usize,
    /// Failed tool calls.
    pub failed_calls: usize,
    /// Restarts of rollouts with a fresh environment.
    pub retries: usize,
    /// Rollouts whose environment failed finally.
    pub lost: usize,
    /// Rollouts whose tokens differ from the chat template's text.
    pub differ_from_template: usize,
}

impl TurnStats {
    /// Counts an outcome.
    pub fn add(&mut self, outcome: &Outcome) {
        self.absorb(&Self {
            rollouts: 1,
            tool_calls: outcome.tool_calls,
            failed_calls: outcome.failed_calls,
            retries: outcome.retries,
            lost: usize::from(outcome.lost.is_some()),
            differ_from_template: usize::from(outcome.differs_from_template),
        });
    }

    /// Adds the statistics of other rollouts.
    pub fn absorb(&mut self, other: &Self) {
        self.rollouts += other.rollouts;
        self.tool_calls += other.tool_calls;
        self.failed_calls += other.failed_calls;
        self.retries += other.retries;
        self.lost += other.lost;
        self.differ_from_template += other.differ_from_template;
    }
}
