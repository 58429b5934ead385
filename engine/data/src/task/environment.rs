//! Environments answer the turns of a model with more of the conversation.
//!
//! Each rollout has its own environment. It is reset with the rollout's example, then called after every turn of the
//! model, and at the end for the rollout's reward. Environments with equal starts and turns must give equal
//! answers: a failed rollout is repeated in a fresh one, and a resumed run repeats its steps.

mod calculator;
mod config;
mod python;
mod session;
mod tool_call;

pub use calculator::{Calculator, CalculatorConfig};
pub use config::{EnvironmentConfig, PythonEnvironmentConfig, ToolRole};
pub use python::PythonEnvironments;
#[doc(hidden)]
pub use session::read_reply;
pub use tool_call::{ToolCall, ToolCalls, ToolParser};

use super::Example;
use firebrick_models::tokenizer::Message;
use serde_json::Value;
use std::path::PathBuf;

/// The role of a tool's answer.
pub const TOOL: &str = "tool";

/// A tool's answer, with the tool's name as in TRL.
pub fn tool_answer(name: &str, content: impl Into<String>) -> Message {
    Message::new(TOOL, content).with("name", name)
}

/// The environment of one rollout.
pub trait Environment: Send {
    /// Seeds the random draws of the next reset: rollouts of a group have the same seed.
    fn seed(&mut self, _seed: u32) {}

    /// Starts a rollout with an example. The returned text is appended to the last user message of the
    /// prompt. It should depend only on the example and the seed.
    ///
    /// # Errors
    /// [`EnvironmentError`] if it cannot start.
    fn reset(&mut self, example: &Example) -> Result<Option<String>, EnvironmentError>;

    /// Answers a turn. An answer without messages ends the rollout.
    ///
    /// # Errors
    /// [`EnvironmentError`] if it cannot answer. A call that a tool rejects is no error: it gets an answer.
    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError>;

    /// Reward of the rollout, as a part with the name `environment`; `None` if only the task's rewards
    /// count. Called once, after the last turn.
    ///
    /// # Errors
    /// [`EnvironmentError`] if it cannot be computed.
    fn reward(&mut self) -> Result<Option<f64>, EnvironmentError> {
        Ok(None)
    }

    /// Description from which a reward function in another process copies the environment's object, after the last
    /// turn; `None` without [`Environments::keep_objects`].
    ///
    /// # Errors
    /// [`EnvironmentError`] if the environment is lost. An object that cannot be copied is no error: the reward function
    /// gets the reason.
    fn object(&mut self) -> Result<Option<Value>, EnvironmentError> {
        Ok(None)
    }
}

/// Makes a task's environments.
pub trait Environments: Send + Sync {
    /// Their tools, as the list of JSON schemas for chat templates.
    fn tools(&self) -> &Value;

    /// Makes the environment of a rollout, to be reset before its first turn. `worker` is one of
    /// [`Environments::workers`].
    fn make(&self, worker: usize) -> Box<dyn Environment>;

    /// Threads that call them while others are sampled; each environment is called by one. 0: they answer at once,
    /// and the sampler calls them itself.
    fn workers(&self) -> usize {
        0
    }

    /// Returns true if [`Environment::reset`] may extend a prompt, so that its length is not known before.
    fn adds_to_prompts(&self) -> bool {
        false
    }

    /// Files of the user's modules imported so far, without the configured file.
    fn modules(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Requests their objects for a reward function ([`Environment::object`]). Returns true if they have objects.
    fn keep_objects(&self) -> bool {
        false
    }
}

/// A turn of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Its text.
    pub text: String,
    /// Its tool calls in order, or the reasons why they cannot be parsed.
    pub calls: ToolCalls,
}

/// Answer of an environment to a turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// The messages that follow the turn; an empty list ends the rollout.
    pub messages: Vec<Message>,
    /// Failed tool calls: malformed ones and ones that a tool rejected.
    pub failed_calls: usize,
}

impl Observation {
    /// The end of the rollout.
    pub fn end() -> Self {
        Self::default()
    }

    /// A message with the role `tool` for every call of a turn, with the result of `call`. An error
    /// becomes a message too, so that the model can try again: `{"error": REASON}`, as in TRL.
    pub fn of_calls(turn: &Turn, mut call: impl FnMut(&ToolCall) -> Result<String, String>) -> Self {
        let mut observation = Self::default();
        for parsed in &turn.calls {
            observation.add(parsed.as_ref().map_err(Clone::clone).and_then(&mut call));
            if let (Ok(call), Some(last)) = (parsed, observation.messages.last_mut()) {
                *last = last.clone().with("name", call.name.as_str());
            }
        }
        observation
    }

    /// Adds the result of a tool.
    pub fn add(&mut self, result: Result<String, String>) {
        self.failed_calls += usize::from(result.is_err());
        let content = result.unwrap_or_else(|reason| serde_json::json!({"error": reason}).to_string());
        self.messages.push(Message::new(TOOL, content));
    }
}

/// Failure of an environment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct EnvironmentError {
    /// Reason of the failure.
    pub reason: String,
    /// True if it failed by itself; false if it was lost with a shared process.
    pub own: bool,
    /// True if its code raised or returned an invalid value. A fresh one would too, so it ends the run.
    pub of_code: bool,
}

impl EnvironmentError {
    /// A failure that may not recur: the rollout is repeated once.
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), own: true, of_code: false }
    }

    /// A failure of its code, which ends the run.
    pub fn of_code(reason: impl Into<String>) -> Self {
        Self { of_code: true, ..Self::new(reason) }
    }
}
