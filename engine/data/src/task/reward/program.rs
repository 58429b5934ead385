//! Settings of rewards that other programs compute: functions in Python, and commands.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::task::TaskError;

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
    #[serde(default = "default_python")]
    pub python: String,
    /// Worker processes.
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Time limit in seconds per prompt's completions, at most 86,400.
    #[serde(default = "default_timeout")]
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
    #[serde(default = "default_workers")]
    pub workers: usize,
    /// Time limit in seconds per prompt's completions, at most 86,400.
    #[serde(default = "default_timeout")]
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

fn default_python() -> String {
    "python3".to_owned()
}

fn default_workers() -> usize {
    2
}

fn default_timeout() -> f64 {
    60.0
}

impl RewardProgram {
    /// Processes that judge at the same time.
    #[must_use]
    pub fn workers(&self) -> usize {
        match self {
            Self::Python(config) => config.workers,
            Self::Command(config) => config.workers,
        }
    }

    /// Seconds that a call may take.
    #[must_use]
    pub fn timeout(&self) -> f64 {
        match self {
            Self::Python(config) => config.timeout,
            Self::Command(config) => config.timeout,
        }
    }

    /// Refuses settings that make no sense; `setting` is where they stand.
    pub(super) fn check(&self, setting: impl Fn(&str) -> String) -> Result<(), TaskError> {
        if self.workers() == 0 {
            let detail = "expected at least 1 process, found 0";
            return Err(TaskError::config(setting("workers"), detail));
        }
        let timeout = self.timeout();
        // a day, far beyond every call and within what clocks can add
        if !(timeout > 0.0 && timeout <= 86_400.0) {
            let detail = format!("expected seconds, more than 0 and at most 86400, found {timeout}");
            return Err(TaskError::config(setting("timeout"), detail));
        }
        match self {
            Self::Command(config) if config.command.first().is_none_or(String::is_empty) => {
                let detail = "expected a program and its arguments as a list, found none";
                Err(TaskError::config(setting("command"), detail))
            }
            _ => Ok(()),
        }
    }
}
