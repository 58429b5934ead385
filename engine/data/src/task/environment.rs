//! Environments: what answers the turns of a model with more of the conversation.
//!
//! A rollout has an environment of its own. It is reset with the rollout's example, then asked after every turn of the
//! model, and at the end what the rollout was worth. Environments that start alike and are told the same have to answer
//! the same: a rollout is tried again in a fresh one, and a resumed run repeats its steps.

mod calculator;
mod config;
mod python;
mod session;
mod tool_call;

pub use calculator::{Calculator, CalculatorConfig};
pub use config::{EnvironmentConfig, PythonEnvironmentConfig, ToolRole};
pub use python::PythonEnvironments;
pub use tool_call::{ToolCall, ToolCalls, ToolParser};

use super::Example;
use firebrick_models::tokenizer::Message;
use serde_json::Value;
use std::path::PathBuf;

/// The role of a tool's answer.
pub const TOOL: &str = "tool";

/// A tool's answer, with the tool's name as in TRL.
#[must_use]
pub fn tool_answer(name: &str, content: impl Into<String>) -> Message {
    Message::new(TOOL, content).with("name", name)
}

/// What answers the turns of one rollout.
pub trait Environment: Send {
    /// Seeds what the next reset draws at random: rollouts of a group have the same seed.
    fn seed(&mut self, _seed: u32) {}

    /// Begins anew with an example. The text, if there is one, is appended to the last message of the prompt that the
    /// user wrote. It should depend on the example and the seed alone.
    ///
    /// # Errors
    /// Where it cannot begin.
    fn reset(&mut self, example: &Example) -> Result<Option<String>, EnvironmentError>;

    /// Answers a turn. Without messages the rollout has ended.
    ///
    /// # Errors
    /// Where it cannot answer, which is another thing than a call that a tool refuses: that is an answer.
    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError>;

    /// What the rollout was worth, as a part of the reward with the name `environment`; none where the task's rewards
    /// say all there is to say. Asked once, after the last turn.
    ///
    /// # Errors
    /// Where it cannot be computed.
    fn reward(&mut self) -> Result<Option<f64>, EnvironmentError> {
        Ok(None)
    }

    /// How a reward function in another process makes a copy of the object behind it, after its last turn; none where
    /// nobody wants one ([`Environments::keep_objects`]).
    ///
    /// # Errors
    /// Where the environment is gone. An object that cannot be copied is none: the reward function is told why.
    fn object(&mut self) -> Result<Option<Value>, EnvironmentError> {
        Ok(None)
    }
}

/// Makes a task's environments.
pub trait Environments: Send + Sync {
    /// The tools that they have, as the list of JSON schemas that chat templates are given.
    fn tools(&self) -> &Value;

    /// Makes the environment of a rollout, to be reset before its first turn. `worker` is one of
    /// [`Environments::workers`].
    fn make(&self, worker: usize) -> Box<dyn Environment>;

    /// Threads that ask them, while others are sampled; an environment is asked by one alone. 0: they answer in no
    /// time, and the sampler asks them itself.
    fn workers(&self) -> usize {
        0
    }

    /// Whether [`Environment::reset`] may add to a prompt, so that its length is not known before.
    fn adds_to_prompts(&self) -> bool {
        false
    }

    /// Files of the user's modules that they have imported so far, the file that was named apart.
    fn modules(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Says that a reward function looks at the objects behind them ([`Environment::object`]). Whether there are some.
    fn keep_objects(&self) -> bool {
        false
    }
}

/// A turn of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Its text.
    pub text: String,
    /// The tools it calls, in order; of what cannot be read as a call, the reason.
    pub calls: ToolCalls,
}

/// What an environment says to a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The messages that follow the turn; none end the rollout.
    pub messages: Vec<Message>,
    /// Calls of tools that failed: those that the model got wrong, and those that a tool refused.
    pub failed_calls: usize,
}

impl Observation {
    /// The rollout has ended.
    #[must_use]
    pub fn end() -> Self {
        Self::default()
    }

    /// A message of the role `tool` for every call of a turn. `call` is asked for what a call gives; what it refuses
    /// becomes a message too, so that the model may try again: `{"error": REASON}`, as in TRL.
    pub fn of_calls(turn: &Turn, mut call: impl FnMut(&ToolCall) -> Result<String, String>) -> Self {
        let mut observation = Self::default();
        for own in &turn.calls {
            let said = own.as_ref().map_err(Clone::clone).and_then(&mut call);
            observation.add(said);
            if let (Ok(call), Some(last)) = (own, observation.messages.last_mut()) {
                *last = last.clone().with("name", call.name.as_str());
            }
        }
        observation
    }

    /// Adds what a tool said.
    pub fn add(&mut self, said: Result<String, String>) {
        self.failed_calls += usize::from(said.is_err());
        let content = said.unwrap_or_else(|reason| serde_json::json!({"error": reason}).to_string());
        self.messages.push(Message::new(TOOL, content));
    }
}

/// Why an environment failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct EnvironmentError {
    /// What happened.
    pub reason: String,
    /// Whether it failed by itself. Otherwise it is gone with something that it shared with others, such as a process.
    pub own: bool,
    /// Whether its code raised, or returned what it may not: a fresh one would too, so it ends the run.
    pub of_code: bool,
}

impl EnvironmentError {
    /// A failure of its own that a fresh one may not have: its rollout is tried once more.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), own: true, of_code: false }
    }

    /// A failure of its code, which ends the run.
    #[must_use]
    pub fn of_code(reason: impl Into<String>) -> Self {
        Self { of_code: true, ..Self::new(reason) }
    }
}
