//! Settings of environments.

use crate::task::TaskError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Environment of multi-turn rollouts.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EnvironmentConfig {
    /// A Python class, as for TRL's `environment_factory`.
    Python(PythonEnvironmentConfig),
}

/// Role of tool responses in the chat template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ToolRole {
    /// A message per call.
    #[default]
    Tool,
    /// A message per turn, for templates without `tool`.
    User,
}

/// A Python class with `reset(**row)`, public methods that are the tools, and optionally `get_reward()`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonEnvironmentConfig {
    /// Python file; it can import from its folder.
    pub file: PathBuf,
    /// Class with `reset(**row)`, tools as public methods and optionally `get_reward()`, or a function that returns an
    /// instance.
    pub class: String,
    /// Keyword arguments of the class.
    #[serde(default)]
    pub kwargs: Map<String, Value>,
    /// Interpreter: a program on the `PATH`, or a path.
    #[serde(default = "default_python")]
    pub python: String,
    /// Worker processes.
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Time limit per call in seconds, at most 86,400.
    #[serde(default = "default_timeout")]
    pub timeout: f64,
}

fn default_python() -> String {
    "python3".to_owned()
}

fn default_workers() -> usize {
    2
}

fn default_timeout() -> f64 {
    60.0
}

impl PythonEnvironmentConfig {
    /// Refuses settings that make no sense.
    pub(super) fn check(&self) -> Result<(), TaskError> {
        if self.workers == 0 {
            let detail = "expected at least 1 process, found 0";
            return Err(TaskError::config("task.environment.workers", detail));
        }
        let timeout = self.timeout;
        // a day, far beyond every call and within what clocks can add
        if !(timeout > 0.0 && timeout <= 86_400.0) {
            let detail = format!("expected seconds, more than 0 and at most 86400, found {timeout}");
            return Err(TaskError::config("task.environment.timeout", detail));
        }
        Ok(())
    }
}
