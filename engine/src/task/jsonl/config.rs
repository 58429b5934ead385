//! Settings of a task made of rows.

use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};

use crate::task::rows::validation_schema;
use crate::task::{EnvironmentConfig, RewardConfig, RowFiles};

/// Settings of a task made of rows.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// Name in metrics: `val-core/<name>/reward`. The task's kind where absent.
    #[serde(default)]
    pub name: Option<String>,
    /// Training rows: a file, a folder, a pattern, a dataset of the Hub, or a list of these, with weights. verl:
    /// `data.train_files`.
    pub train: RowFiles,
    /// Validation rows, from the same kinds of places; without any, they are held out of `train`. verl:
    /// `data.val_files`.
    #[serde(default)]
    #[schemars(schema_with = "validation_schema")]
    pub validation: Option<RowFiles>,
    /// Rows in validation: the first of the `validation` files (absent: all of them), or, without such
    /// files, drawn from `train` by `seed` and not trained on (absent: none).
    #[serde(default)]
    pub validation_size: Option<u64>,
    /// The same as a share of `train`, at least one row; only without `validation` files.
    #[serde(default)]
    pub validation_fraction: Option<f64>,
    /// Seed of which rows are held out.
    #[serde(default)]
    pub seed: u64,
    /// Rows read from `train`, the first of its files; the rest is ignored. verl:
    /// `data.train_max_samples`.
    #[serde(default)]
    pub limit: Option<u64>,
    /// The prompt as a text template, such as `"Question: {question}\nAnswer:"`.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The prompt as chat messages whose contents are templates.
    #[serde(default)]
    pub messages: Option<Vec<Message>>,
    /// The field, as a dotted path, that holds the prompt: a text, or a list of chat messages. This
    /// is the default, with the field `prompt` (TRL's and verl's). verl: `data.prompt_key`.
    #[serde(default)]
    pub prompt_field: Option<String>,
    /// A system message put before a chat prompt.
    #[serde(default)]
    pub system_prompt: Option<String>,
    /// The ground truth as a template.
    #[serde(default)]
    pub answer: Option<String>,
    /// The field that holds the ground truth, as a dotted path. Where neither is set, verl's
    /// `reward_model.ground_truth` is read from rows that have it.
    #[serde(default)]
    pub answer_field: Option<String>,
    /// How to take the ground truth out of a longer text: `gsm8k` (what follows the last `####`),
    /// or `regex: PATTERN` (group 1 of its last match, or the match if there is no group).
    #[serde(default)]
    pub answer_extract: Option<Extract>,
    /// A demonstration to learn from in supervised training, as a template.
    #[serde(default)]
    pub solution: Option<String>,
    /// The field that holds the demonstration, as a dotted path.
    #[serde(default)]
    pub solution_field: Option<String>,
    /// What answers the turns of rollouts of several turns: an object of the class for each. TRL:
    /// `environment_factory`.
    #[serde(default)]
    pub environment: Option<EnvironmentConfig>,
    /// What completions are judged by; the reward is their weighted sum.
    pub rewards: Vec<RewardConfig>,
}

/// How a ground truth is taken out of a longer text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// What follows the last `####`, trimmed, without commas.
    Gsm8k,
    /// Group 1 of the pattern's last match, or the match if the pattern has no group, trimmed.
    Regex(String),
}
