//! Settings of a task made of rows.

use std::path::PathBuf;

use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};

use crate::task::RewardConfig;

/// Settings of a task made of rows.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// Name in metrics: `val-core/<name>/reward`.
    #[serde(default = "default_name")]
    pub name: String,
    /// File of training rows. verl: `data.train_files`.
    pub train: PathBuf,
    /// File of validation rows; without one, they are held out of `train`. verl: `data.val_files`.
    #[serde(default)]
    pub validation: Option<PathBuf>,
    /// Rows in validation: the first of the `validation` file (absent: all of it), or, without that
    /// file, drawn from `train` by `seed` and not trained on (absent: none).
    #[serde(default)]
    pub validation_size: Option<u64>,
    /// The same as a share of `train`, at least one row; only without a `validation` file.
    #[serde(default)]
    pub validation_fraction: Option<f64>,
    /// Seed of which rows are held out.
    #[serde(default)]
    pub seed: u64,
    /// Rows read from `train`, the first of the file; the rest is ignored. verl:
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
    /// The field that holds the ground truth, as a dotted path. In verl's rows:
    /// `reward_model.ground_truth`.
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
    /// What completions are judged by; the reward is their weighted sum.
    pub rewards: Vec<RewardConfig>,
}

/// How a ground truth is taken out of a longer text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// What follows the last `####`, trimmed, without commas.
    Gsm8k,
    /// Group 1 of the pattern's last match, or the match if the pattern has no group, trimmed.
    Regex(String),
}

pub(super) fn default_name() -> String {
    "jsonl".to_owned()
}
