//! Settings of rewards that other programs compute: functions in Python, and commands.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::task::workers;

/// A reward function in a Python file, with TRL's signature or verl's.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonRewardConfig {
    /// Python file; it can import from its folder, or is a module of the package that it is in.
    pub file: PathBuf,
    /// Function in the file, or `Class.method`. With a parameter `solution_str` or `solution_strs` it has verl's
    /// signature, otherwise TRL's.
    #[serde(default = "default_function")]
    pub function: String,
    /// Additional keyword arguments.
    #[serde(default)]
    pub kwargs: Map<String, Value>,
    /// Arguments of a function or class that returns the reward function; `{}` for none. `null`: `function` is the
    /// reward function.
    #[serde(default)]
    pub arguments: Option<Map<String, Value>>,
    /// Interpreter: a program on the `PATH`, or a path.
    #[serde(default = "workers::default_python")]
    pub python: String,
    /// Worker processes.
    #[serde(default = "workers::default_workers")]
    #[schemars(range(min = 1))]
    pub workers: usize,
    /// Time limit in seconds per prompt's completions.
    #[serde(default = "workers::default_timeout")]
    #[schemars(range(max = 86_400), extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
}

/// A program that scores completions: JSON lines in, JSON lines out.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandRewardConfig {
    /// Program and arguments. A program with a `/` is a path relative to the configuration file.
    pub command: Vec<String>,
    /// Working directory. `null`: the current one.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Worker processes.
    #[serde(default = "workers::default_workers")]
    #[schemars(range(min = 1))]
    pub workers: usize,
    /// Time limit in seconds per prompt's completions.
    #[serde(default = "workers::default_timeout")]
    #[schemars(range(max = 86_400), extend("exclusiveMinimum" = 0))]
    pub timeout: f64,
}

/// A reward that another program computes.
#[derive(Clone, Debug, PartialEq)]
pub enum RewardProgram {
    /// A Python function.
    Python(PythonRewardConfig),
    /// A command.
    Command(CommandRewardConfig),
}

fn default_function() -> String {
    "compute_score".to_owned()
}

impl RewardProgram {
    /// Processes that score at the same time.
    pub fn workers(&self) -> usize {
        match self {
            Self::Python(config) => config.workers,
            Self::Command(config) => config.workers,
        }
    }

    /// Seconds that a call may take.
    pub fn timeout(&self) -> f64 {
        match self {
            Self::Python(config) => config.timeout,
            Self::Command(config) => config.timeout,
        }
    }
}
