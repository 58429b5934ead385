//! Where prompts come from and what a completion is worth.
//!
//! A [`Task`] is a pure function of (split, index): it keeps no position and no generator, so a
//! resumed run sees the prompts that it would have seen. [`shuffled_index`] turns the number of a
//! draw into the index to ask for.

pub mod arithmetic;
pub mod countdown;
pub mod environment;
mod error;
pub mod jsonl;
mod number;
mod operation;
mod problems;
mod reading;
pub(crate) mod recipe;
pub mod reward;
pub(crate) mod rows;
mod shuffle;
pub(crate) mod template;

use std::path::Path;

use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use self::arithmetic::{Arithmetic, ArithmeticConfig};
pub use self::countdown::{Countdown, CountdownConfig};
pub use self::environment::{
    Calculator, CalculatorConfig, Environment, EnvironmentConfig, EnvironmentError, Environments,
    Observation, PythonEnvironmentConfig, PythonEnvironments, ToolCall, ToolParser, Turn,
};
pub use self::error::{RowLocation, TaskError, Unit};
pub use self::jsonl::{Jsonl, JsonlConfig};
pub use self::problems::TaskProblem;
pub use self::reading::Reading;
pub use self::reward::{
    BatchedReward, CommandRewardConfig, Gsm8kMethod, PythonRewardConfig, RepetitionUnit,
    RewardConfig, RewardInput, RewardKind, RewardModelConfig, RewardOptions, RewardProgram,
    Rewards, RunningStats, Shaping,
};
pub use self::rows::{RowFiles, RowSource};
pub use self::shuffle::{Permutation, shuffled_index};

/// The field of a row that a chat template is given as its tools: a list of JSON schemas, as in transformers and TRL.
pub const TOOLS: &str = "tools";

/// A source of prompts, and the judge of their completions.
pub trait Task: Send + Sync {
    /// The task's name in metrics: `val-core/<name>/reward`.
    fn name(&self) -> &str;

    /// The number of examples of a split. `None` is endless (generated); validation is always
    /// `Some`, and 0 where nothing is held out.
    fn len(&self, split: Split) -> Option<u64>;

    /// Whether a split has no examples.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == Some(0)
    }

    /// The example at `index`: the same for the same index, always.
    ///
    /// # Errors
    /// Where the example cannot be had: its file has changed, or the task cannot make one.
    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError>;

    /// The set that a held-out example belongs to in metrics, where the task names one. Otherwise it is the one that its row's
    /// `data_source` names (verl), or one with the task's name.
    fn validation_set(&self, _: u64) -> Option<&str> {
        None
    }

    /// Bytes of host memory that its examples are held in: those of generated ones are none.
    fn held_bytes(&self) -> u64 {
        0
    }

    /// The characters of its prompts and answers, where a model that starts from random weights may have one token a
    /// character. `None`: such a model needs a tokenizer from elsewhere.
    fn alphabet(&self) -> Option<&str> {
        None
    }

    /// Tokens of several characters that such a model has beside those of the alphabet.
    fn tokens(&self) -> &[&str] {
        &[]
    }

    /// The chat template of such a model, in Jinja.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// What answers the turns of its rollouts, where they have several.
    fn environments(&self) -> Option<&dyn Environments> {
        None
    }

    /// A demonstration of several turns for supervised training, as the messages that follow the prompt: those of the assistant are
    /// learnt. In place of [`Example::solution`].
    fn demonstration(&self, _: &Example) -> Option<Vec<Message>> {
        None
    }

    /// The list that the reward is the weighted sum of, where the task has one. It names the reward models and programs, which
    /// judge many completions together, and says what is normalised and clipped; [`Task::reward`] then gives what its rules
    /// say.
    fn rewards(&self) -> Option<&Rewards> {
        None
    }

    /// What a completion is worth. An error means that the sample cannot be judged; a wrong
    /// completion is worth little, but it is not an error.
    ///
    /// # Errors
    /// Where the sample cannot be judged; the run ends.
    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError>;

    /// What a completion is worth in validation, where shaping that helps learning would only blur
    /// the number. The training reward unless the task says otherwise.
    ///
    /// # Errors
    /// As [`reward`](Self::reward).
    fn validation_reward(
        &self,
        example: &Example,
        completion: &Completion<'_>,
    ) -> Result<Reward, TaskError> {
        self.reward(example, completion)
    }
}

/// Which of a task's examples: those to learn from, or those held out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Examples to learn from.
    Train,
    /// Examples held out: never among [`Split::Train`].
    Validation,
}

impl Split {
    /// The split's name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Validation => "validation",
        }
    }
}

/// One prompt with what is known about its answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    /// What the model is asked.
    pub prompt: PromptText,
    /// The ground truth that rewards compare with; empty if the task has none.
    pub answer: String,
    /// A demonstration of a good completion, for supervised training.
    pub solution: Option<String>,
    /// The row that the example was made from, for rewards of one's own and for the sample log.
    pub fields: Map<String, Value>,
}

impl Example {
    /// A text prompt and the ground truth that its completions are compared with; no demonstration, no row.
    #[must_use]
    pub fn text(prompt: impl Into<String>, answer: impl Into<String>) -> Self {
        Self {
            prompt: PromptText::Text(prompt.into()),
            answer: answer.into(),
            solution: None,
            fields: Map::new(),
        }
    }
}

/// A prompt before tokenization.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptText {
    /// Text, encoded as it is.
    Text(String),
    /// A conversation, rendered by the model's chat template with a generation prompt.
    Chat(Vec<Message>),
}

/// A sampled completion, as a reward sees it.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// Its text, without special tokens; of several turns that of the last.
    pub text: &'a str,
    /// Its tokens, those of all turns and between them.
    pub tokens: &'a [u32],
    /// Whether it ended by itself (an end token or a stop string), not by the length limit.
    pub finished: bool,
    /// The length limit it was sampled under, in tokens.
    pub max_tokens: usize,
}

/// What a completion is worth.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reward {
    /// The weighted sum of the parts, in training after what the task's list says of normalising and clipping them.
    pub total: f64,
    /// Each part's name and value before all that; NaN where a reward does not apply to the completion.
    pub parts: Vec<(String, f64)>,
    /// Each part's weight, in the same order.
    pub weights: Vec<f64>,
    /// Whether the completion is right, where a part says so by comparing it with the ground truth: the first of them does.
    pub correct: Option<bool>,
    /// What rules read in the completion, beside what they compared it with.
    pub readings: Vec<Reading>,
}

impl Reward {
    /// A reward of one part with weight 1.
    #[must_use]
    pub fn single(name: impl Into<String>, value: f64) -> Self {
        Self {
            total: value,
            parts: vec![(name.into(), value)],
            weights: vec![1.0],
            ..Self::default()
        }
    }

    /// With a judgement of what was read, beside the ground truth.
    #[must_use]
    pub fn judged(mut self, correct: bool, parsed: &str, gold: &str) -> Self {
        let reward = self.parts.first().map(|(name, _)| name.clone());
        self.correct = Some(correct);
        self.readings.push(Reading {
            reward: reward.unwrap_or_default(),
            parsed: Some(Reading::short(parsed)),
            gold: Some(Reading::short(gold)),
            undecided: None,
        });
        self
    }

    /// Adds a part.
    pub fn add(&mut self, name: impl Into<String>, value: f64, weight: f64) {
        self.total += weight * value;
        self.parts.push((name.into(), value));
        self.weights.push(weight);
    }
}

/// The `task` section of a configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskConfig {
    /// Generated sums: learnable by a very small model, with nothing to download.
    Arithmetic(ArithmeticConfig),
    /// Generated problems: reach a number with other numbers.
    Countdown(CountdownConfig),
    /// Generated products that are too long for a model's head, with a calculator as a tool.
    Calculator(CalculatorConfig),
    /// Rows of Parquet and JSON files.
    Dataset(Box<JsonlConfig>),
    /// The same under its first name, which metrics keep.
    Jsonl(Box<JsonlConfig>),
}

impl TaskConfig {
    /// Builds the task: reads its files and checks every row. Relative paths are resolved against
    /// `base`, the folder of the configuration file.
    ///
    /// # Errors
    /// Those of the task's settings, files and rows, with the setting and the place.
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
    #[must_use]
    pub fn rows(&self) -> Option<&JsonlConfig> {
        match self {
            Self::Dataset(rows) | Self::Jsonl(rows) => Some(rows),
            Self::Arithmetic(_) | Self::Countdown(_) | Self::Calculator(_) => None,
        }
    }

    /// Writes out the name in metrics where it follows from the kind.
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
        assert_eq!(
            serde_json::from_str::<TaskConfig>(&written).expect("reads back"),
            config
        );
    }

    #[test]
    fn unknown_kinds_and_keys_are_rejected() {
        let error = |json: &str| {
            serde_json::from_str::<TaskConfig>(json)
                .expect_err("refused")
                .to_string()
        };
        assert!(error(r#"{"kind": "arithmetics"}"#).contains("unknown variant `arithmetics`"));
        assert!(
            error(r#"{"kind": "arithmetic", "dificulty": 1}"#)
                .contains("unknown field `dificulty`")
        );
        assert!(
            error(r#"{"kind": "jsonl", "train": "a", "rewards": [], "promt": ""}"#)
                .contains("unknown field `promt`")
        );
    }
}
