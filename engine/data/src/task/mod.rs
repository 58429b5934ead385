//! Tasks: prompts, and rewards of completions.
//!
//! A [`Task`] is a pure function of (split, index): it keeps no position and no generator, so a
//! resumed run sees the prompts that it would have seen. [`shuffled_index`] turns the number of a
//! draw into the index to ask for.

pub mod arithmetic;
mod completion;
mod config;
pub mod conversation;
pub mod countdown;
pub mod environment;
mod error;
mod example;
mod fields;
pub mod jsonl;
mod operation;
mod problems;
mod reading;
pub(crate) mod recipe;
pub mod reward;
pub mod rows;
mod shuffle;
pub mod template;
mod traits;
mod workers;

pub use self::arithmetic::{Arithmetic, ArithmeticConfig};
pub use self::completion::{Completion, Reward, Score};
pub use self::config::TaskConfig;
pub use self::countdown::{Countdown, CountdownConfig};
pub use self::environment::{
    Calculator, CalculatorConfig, Environment, EnvironmentConfig, EnvironmentError, Environments, Observation,
    PythonEnvironmentConfig, PythonEnvironments, ToolCall, ToolCalls, ToolParser, ToolRole, Turn,
};
pub use self::error::{RowLocation, TaskError, Unit};
pub use self::example::{Example, PromptText, Split, TEMPLATE_KWARGS, TOOLS};
pub use self::fields::Fields;
pub use self::jsonl::{Jsonl, JsonlConfig, MessageTemplate};
pub use self::problems::TaskProblem;
pub use self::reading::Reading;
pub use self::reward::{
    CommandRewardConfig, Gsm8kMethod, PythonRewardConfig, RepetitionUnit, RewardConfig, RewardInput, RewardKind,
    RewardModelConfig, RewardOptions, RewardProgram, RewardStats, Rewards, RunningStats, Scorer, Scores,
};
pub use self::rows::{RowFiles, RowSource};
use self::shuffle::Problems;
pub use self::shuffle::{Permutation, shuffled_index};
pub use self::traits::Task;
