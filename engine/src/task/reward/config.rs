//! What a task's `rewards` list says: the rule or model of each, and what becomes of its number.

use std::path::PathBuf;

use firebrick_backends::DeviceSpec;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::plan::ParamOffload;

/// One reward of a task. A task's reward is the weighted sum of all of its rewards.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RewardConfig {
    /// What judges.
    #[serde(flatten)]
    pub kind: RewardKind,
    /// What becomes of its number.
    #[serde(flatten)]
    pub options: RewardOptions,
}

/// What judges a completion.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RewardKind {
    /// 1 if the number the completion concludes with is the answer (verl's GSM8K rule), else 0.
    Gsm8k {
        /// Which number is the conclusion. verl: `method`.
        #[serde(default)]
        method: Gsm8kMethod,
    },
    /// 1 if the completion is the answer, both trimmed, else 0.
    Exact {
        /// Whether upper and lower case are the same.
        #[serde(default)]
        ignore_case: bool,
    },
    /// 1 if the completion contains the answer (trimmed), else 0.
    Contains {
        /// Whether upper and lower case are the same.
        #[serde(default)]
        ignore_case: bool,
    },
    /// With a capture group: 1 if group 1 of the last match is the answer, both trimmed, else 0.
    /// Without one: 1 if the pattern matches (a format reward), else 0.
    Regex {
        /// The pattern, in Rust's regex syntax; `.` also matches a line break.
        pattern: String,
    },
    /// 1 if the last number in the completion is the answer, else 0.
    Number {
        /// Largest absolute difference that still counts as equal.
        #[serde(default = "default_tolerance")]
        tolerance: f64,
    },
    /// A penalty between 0 and −1 by the completion's tokens. Set exactly one of `target`, `max`
    /// and `buffer`; a negative weight makes it a bonus.
    Length {
        /// Tokens. 0 at this length, falling linearly to −1 at zero tokens and at twice as many.
        #[serde(default)]
        target: Option<usize>,
        /// Tokens. 0 up to this length, −1 beyond.
        #[serde(default)]
        max: Option<usize>,
        /// Tokens. DAPO's soft overlong penalty: 0 up to the completion limit less this buffer,
        /// then linearly down to −1 at the limit. verl: `overlong_buffer.len`, and its
        /// `penalty_factor` is our weight.
        #[serde(default)]
        buffer: Option<usize>,
    },
    /// The score of a reward model, a `…ForSequenceClassification` checkpoint with one label.
    Model(RewardModelConfig),
}

/// A reward model: which, where it computes, and what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// Where it computes; the run's own device where absent.
    #[serde(default)]
    pub device: Option<DeviceSpec>,
    /// What it reads.
    #[serde(default)]
    pub input: RewardInput,
    /// Most tokens of one of its forward batches, a hard limit; `memory.score_tokens` where absent.
    #[serde(default)]
    pub score_tokens: Option<usize>,
    /// Whether its weights wait on the host while others work, or visit the device segment by segment.
    #[serde(default)]
    pub param_offload: ParamOffload,
}

/// What a reward model reads of a prompt and its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardInput {
    /// `chat` where the prompt is a conversation and the model has a chat template, else `text`.
    #[default]
    Auto,
    /// The conversation with the completion as the assistant's turn, by the reward model's own chat template. A prompt that
    /// is plain text is the user's turn.
    Chat,
    /// The prompt's text and the completion's, by the reward model's own tokenizer.
    Text,
    /// The policy's token ids as they are: the vocabularies must be the same.
    Tokens,
}

/// What becomes of a reward's number: `weight · clip(normalise(value))`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RewardOptions {
    /// Factor in the sum (TRL: `reward_weights`).
    pub weight: f64,
    /// Name in metrics and samples; the kind if absent.
    pub name: Option<String>,
    /// Whether the mean of all its values so far is subtracted and their standard deviation divided by, in training.
    pub normalize: bool,
    /// Least and greatest value that counts in training, after normalisation (TRL: `score_clip`).
    pub clip: Option<[f64; 2]>,
}

/// The keys of [`RewardOptions`], which stand beside those of the kind.
const OPTIONS: [&str; 4] = ["weight", "name", "normalize", "clip"];

impl Default for RewardOptions {
    fn default() -> Self {
        Self {
            weight: 1.0,
            name: None,
            normalize: false,
            clip: None,
        }
    }
}

/// How the GSM8K reward finds a completion's conclusion, within its last 300 characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// The last number written as `#### 42`.
    #[default]
    Strict,
    /// The last number.
    Flexible,
}

fn default_tolerance() -> f64 {
    1e-6
}

impl<'de> Deserialize<'de> for RewardConfig {
    /// Serde's `flatten` accepts unknown keys, so the two halves are told apart by hand.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut kind = Map::<String, Value>::deserialize(deserializer)?;
        let options: Map<String, Value> = OPTIONS
            .iter()
            .filter_map(|key| kind.remove_entry(*key))
            .collect();
        let kind = RewardKind::deserialize(Value::Object(kind)).map_err(|e| {
            let message = e.to_string();
            if message.starts_with("unknown field") {
                D::Error::custom(format!("{message}, `{}`", OPTIONS.join("`, `")))
            } else {
                D::Error::custom(message)
            }
        })?;
        let options = RewardOptions::deserialize(Value::Object(options));
        let options = options.map_err(|e| D::Error::custom(format!("of a reward: {e}")))?;
        Ok(Self { kind, options })
    }
}

impl From<RewardKind> for RewardConfig {
    /// With weight 1 and nothing else.
    fn from(kind: RewardKind) -> Self {
        Self {
            kind,
            options: RewardOptions::default(),
        }
    }
}

impl RewardConfig {
    /// The name in metrics and samples.
    #[must_use]
    pub fn name(&self) -> &str {
        let kind = match self.kind {
            RewardKind::Gsm8k { .. } => "gsm8k",
            RewardKind::Exact { .. } => "exact",
            RewardKind::Contains { .. } => "contains",
            RewardKind::Regex { .. } => "regex",
            RewardKind::Number { .. } => "number",
            RewardKind::Length { .. } => "length",
            RewardKind::Model(_) => "model",
        };
        self.options.name.as_deref().unwrap_or(kind)
    }
}
