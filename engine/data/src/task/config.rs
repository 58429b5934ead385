//! The `task` section of a configuration, and the task that it builds.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::arithmetic::{Arithmetic, ArithmeticConfig};
use super::countdown::{Countdown, CountdownConfig};
use super::environment::{Calculator, CalculatorConfig};
use super::error::TaskError;
use super::jsonl::{Jsonl, JsonlConfig};
use super::traits::Task;

/// The `task` section of a configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskConfig {
    /// Generated problems such as `37+5=`, for very small models.
    Arithmetic(ArithmeticConfig),
    /// Generated puzzles: reach a target with given integers.
    Countdown(CountdownConfig),
    /// Generated multi-turn problems with a calculator tool.
    Calculator(CalculatorConfig),
    /// Rows of Parquet or JSON files.
    Dataset(Box<JsonlConfig>),
    /// The same as `dataset`, under an older name.
    Jsonl(Box<JsonlConfig>),
}

impl TaskConfig {
    /// Builds the task: reads its files and checks every row. Relative paths are resolved against
    /// `base`, the folder of the configuration file.
    ///
    /// # Errors
    /// [`TaskError`] for invalid settings, files or rows.
    pub fn build(&self, base: &Path) -> Result<Box<dyn Task>, TaskError> {
        Ok(match self {
            Self::Arithmetic(config) => Box::new(Arithmetic::new(config)?),
            Self::Countdown(config) => Box::new(Countdown::new(config)?),
            Self::Calculator(config) => Box::new(Calculator::new(config)?),
            Self::Dataset(rows) => Box::new(Jsonl::new(&rows.named("dataset"), base)?),
            Self::Jsonl(rows) => Box::new(Jsonl::new(&rows.named("jsonl"), base)?),
        })
    }

    /// The settings of a task made of rows.
    pub fn rows(&self) -> Option<&JsonlConfig> {
        match self {
            Self::Dataset(rows) | Self::Jsonl(rows) => Some(rows),
            Self::Arithmetic(_) | Self::Countdown(_) | Self::Calculator(_) => None,
        }
    }

    /// Sets the default name in metrics.
    pub fn spell_out(&mut self) {
        match self {
            Self::Dataset(rows) => **rows = rows.named("dataset"),
            Self::Jsonl(rows) => **rows = rows.named("jsonl"),
            Self::Arithmetic(_) | Self::Countdown(_) | Self::Calculator(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_is_chosen_by_its_kind_and_keeps_its_settings_when_written_back() {
        let json = r#"{"kind": "arithmetic", "difficulty": 2, "operations": "+-"}"#;
        let config: TaskConfig = serde_json::from_str(json).expect("parses");
        let task = config.build(Path::new(".")).expect("builds");
        assert_eq!(task.name(), "arithmetic");
        let written = serde_json::to_string(&config).expect("writes");
        assert_eq!(serde_json::from_str::<TaskConfig>(&written).expect("reads back"), config);
    }

    #[test]
    fn unknown_kinds_and_keys_are_rejected() {
        let error = |json: &str| serde_json::from_str::<TaskConfig>(json).expect_err("refused").to_string();
        assert!(error(r#"{"kind": "arithmetics"}"#).contains("unknown variant `arithmetics`"));
        assert!(error(r#"{"kind": "arithmetic", "dificulty": 1}"#).contains("unknown field `dificulty`"));
        assert!(
            error(r#"{"kind": "jsonl", "train": "a", "rewards": [], "promt": ""}"#).contains("unknown field `promt`")
        );
    }
}
