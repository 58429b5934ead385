//! Settings of environments.

use crate::task::TaskError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::PathBuf;

/// What answers the turns of a task's rollouts.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum EnvironmentConfig {
    /// A class in a Python file, as TRL's `environment_factory`.
    Python(PythonEnvironmentConfig),
}

/// An environment class in a Python file, of TRL's shape: `reset(**row)`, public methods that are the tools, and, where
/// there is one, `get_reward()`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonEnvironmentConfig {
    /// The file. It can import what lies in its folder.
    pub file: PathBuf,
    /// The class, or a function without required parameters that makes an environment (TRL's `environment_factory`).
    pub class: String,
    /// Arguments that it is made with.
    #[serde(default)]
    pub kwargs: Map<String, Value>,
    /// The interpreter: a program on the path, or a file.
    #[serde(default = "default_python")]
    pub python: String,
    /// Processes that the environments live in.
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Seconds that one call may take: `reset`, the tools of a turn, `get_reward`.
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
