//! Settings of a task made of rows.

use firebrick_models::tokenizer::SpecialTokens;
use serde::{Deserialize, Serialize};

use crate::task::rows::validation_schema;
use crate::task::{EnvironmentConfig, RewardConfig, RowFiles};

/// Settings of a task made of rows.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// Name in metrics: `val-core/<name>/reward`. `null`: the `kind`.
    #[serde(default)]
    pub name: Option<String>,
    /// Training rows: a file, folder, glob pattern or Hub dataset (`owner/name`, `hf://datasets/owner/name/path`), or a
    /// list of these or of `{path, weight}`. Optional with an environment: prompts are then what its `reset` returns.
    #[serde(default, skip_serializing_if = "RowFiles::is_empty")]
    pub train: RowFiles,
    /// Validation rows: paths as in `train`, or a mapping from set names to paths.
    #[serde(default)]
    #[schemars(schema_with = "validation_schema")]
    pub validation: Option<RowFiles>,
    /// First rows of `validation` to use (`null`: all), or, without it, rows of `train` to hold out (`null`: none).
    #[serde(default)]
    pub validation_size: Option<u64>,
    /// Fraction of `train` to hold out instead of `validation_size`, at least one row.
    #[serde(default)]
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub validation_fraction: Option<f64>,
    /// Seed of the choice of held-out rows.
    #[serde(default)]
    pub seed: u64,
    /// Maximum rows read from the start of `train`; not with weights.
    #[serde(default)]
    #[schemars(range(min = 1), extend("x-because" = "remove it to read all rows"))]
    pub limit: Option<u64>,
    /// Template of a plain-text prompt, such as `"Question: {question}\nAnswer:"`; `{{` and `}}` are braces.
    #[serde(default)]
    pub prompt: Option<String>,
    /// Chat messages whose contents are templates.
    #[serde(default)]
    #[schemars(length(min = 1))]
    pub messages: Option<Vec<MessageTemplate>>,
    /// Dotted path of a field with text or chat messages. `null`: `prompt`, if `prompt` and `messages` are unset.
    #[serde(default)]
    pub prompt_field: Option<String>,
    /// System message added to chat prompts that have none.
    #[serde(default)]
    pub system_prompt: Option<String>,
    /// How special tokens that rows spell (`<|im_end|>`) are encoded.
    #[serde(default)]
    pub special_tokens: SpecialTokens,
    /// Template of the ground truth.
    #[serde(default)]
    pub answer: Option<String>,
    /// Field of the ground truth (dotted path). `null`, without `answer`: `reward_model.ground_truth` (verl) if rows
    /// have it.
    #[serde(default)]
    pub answer_field: Option<String>,
    /// How to extract the ground truth from a longer text.
    #[serde(default)]
    pub answer_extract: Option<Extract>,
    /// Template of a demonstration for supervised training.
    #[serde(default)]
    pub solution: Option<String>,
    /// Field of the demonstration (dotted path).
    #[serde(default)]
    pub solution_field: Option<String>,
    /// Environment of multi-turn rollouts.
    #[serde(default)]
    pub environment: Option<EnvironmentConfig>,
    /// Rewards, of which the weighted sum counts. A rule gives 1 if its statement holds, else 0.
    pub rewards: Vec<RewardConfig>,
}

/// A chat message whose content is a template.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MessageTemplate {
    /// Role, such as `system`, `user` or `assistant`.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

/// How a ground truth is extracted from a longer string.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// Text after the last `####`, without commas.
    Gsm8k,
    /// `regex: PATTERN`: group 1 of the last match, or the whole match without groups.
    Regex(String),
}
