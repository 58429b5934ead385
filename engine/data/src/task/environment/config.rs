//! Settings of environments.

use crate::task::workers;
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
    #[serde(default = "workers::default_python")]
    pub python: String,
    /// Worker processes.
    #[serde(default = "workers::default_workers")]
    #[schemars(range(min = 1))]
    pub workers: usize,
    /// Time limit per call in seconds.
    #[serde(default = "workers::default_timeout")]
    #[schemars(range(max = 86_400), extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
}
