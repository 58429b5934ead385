//! What a task's `rewards` list says: the rule or model of each, and what becomes of its number.

use std::borrow::Cow;
use std::path::PathBuf;

use firebrick_backends::DeviceSpec;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::program::{CommandRewardConfig, PythonRewardConfig};
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
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
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
    /// 1 if the completion's answer, read as mathematics, is the ground truth, else 0.
    Math {
        /// Largest relative difference of two numbers that still counts as equal; 0 compares exactly.
        #[serde(default)]
        tolerance: f64,
    },
    /// verl's `gsm8k.compute_score`, compared as texts.
    VerlGsm8k {
        /// Which number is the conclusion.
        #[serde(default)]
        method: Gsm8kMethod,
        /// The value of a completion that concludes with another number.
        #[serde(default)]
        format_score: f64,
    },
    /// verl's `math_reward.compute_score`: the last `\\boxed{}` is the answer after the MATH dataset's normalisation.
    VerlMath {},
    /// TRL's `accuracy_reward`: as `math`, with the answer in `\\boxed{}` or in the formula after `final answer is`.
    TrlAccuracy {},
    /// TRL's `think_format_reward`.
    TrlThinkFormat {},
    /// 1 if the completion has tags in order, each once, else 0.
    Format {
        /// Their names, without brackets.
        tags: Vec<String>,
        /// Whether nothing but space may stand outside of them.
        #[serde(default = "yes")]
        only: bool,
        /// Whether the prompt ends with the first tag, so that completions begin inside it.
        #[serde(default)]
        opened: bool,
    },
    /// 1 if the completion's JSON fits a schema, else 0.
    JsonSchema {
        /// The schema.
        schema: Value,
    },
    /// 1 if the letter that the completion settles on is the answer, else 0.
    Choice {
        /// The letters.
        #[serde(default = "default_letters")]
        letters: String,
    },
    /// 1 if the completion's expression reaches the target with the given numbers, else 0.
    Countdown {
        /// Whether every number has to be used.
        #[serde(default = "yes")]
        use_all: bool,
    },
    /// A penalty between 0 and −1: the share of n-grams that stood before.
    Repetition {
        /// Words or tokens of an n-gram.
        #[serde(default = "default_ngram")]
        ngram_size: usize,
        /// What it is made of.
        #[serde(default)]
        unit: RepetitionUnit,
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
    /// A function in a Python file, as it was written for TRL or verl.
    Python(PythonRewardConfig),
    /// A program of any language, JSON lines in and out.
    Command(CommandRewardConfig),
}

/// A reward model: which, where it computes, and what it reads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// The checkpoint's folder.
    pub path: PathBuf,
    /// Where it computes; the run's own device where absent.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardInput {
    /// `chat` where the prompt is a conversation and the model has a chat template, else `text`.
    #[default]
    Auto,
    /// The conversation with the completion as the assistant's turn, by the reward model's own chat template. A prompt
    /// that is plain text is the user's turn.
    Chat,
    /// The prompt's text and the completion's, by the reward model's own tokenizer.
    Text,
    /// The policy's token ids as they are: the vocabularies must be the same.
    Tokens,
}

/// What becomes of a reward's number: `weight · clip(normalise(value))`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
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
        Self { weight: 1.0, name: None, normalize: false, clip: None }
    }
}

/// How the GSM8K reward finds a completion's conclusion, within its last 300 characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// The last number written as `#### 42`.
    #[default]
    Strict,
    /// The last number.
    Flexible,
}

/// What the repetition penalty counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RepetitionUnit {
    /// Words: what stands between spaces, in lower case.
    #[default]
    Words,
    /// The policy's tokens.
    Tokens,
}

fn default_tolerance() -> f64 {
    1e-6
}

fn yes() -> bool {
    true
}

fn default_letters() -> String {
    "ABCDE".to_owned()
}

fn default_ngram() -> usize {
    3
}

impl<'de> Deserialize<'de> for RewardConfig {
    /// Serde's `flatten` accepts unknown keys, so the two halves are told apart by hand.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut kind = Map::<String, Value>::deserialize(deserializer)?;
        let options: Map<String, Value> = OPTIONS.iter().filter_map(|key| kind.remove_entry(*key)).collect();
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

impl schemars::JsonSchema for RewardConfig {
    fn schema_name() -> Cow<'static, str> {
        "RewardConfig".into()
    }

    /// The keys of the options beside those of every kind, as they are read.
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let mut kinds = <RewardKind as schemars::JsonSchema>::json_schema(generator);
        let options = <RewardOptions as schemars::JsonSchema>::json_schema(generator);
        let options = options.get("properties").and_then(Value::as_object);
        let all = kinds.get_mut("oneOf").and_then(Value::as_array_mut);
        for kind in all.into_iter().flatten() {
            let own = kind.get_mut("properties").and_then(Value::as_object_mut);
            if let (Some(own), Some(options)) = (own, options) {
                own.extend(options.clone());
            }
        }
        kinds
    }
}

impl From<RewardKind> for RewardConfig {
    /// With weight 1 and nothing else.
    fn from(kind: RewardKind) -> Self {
        Self { kind, options: RewardOptions::default() }
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
            RewardKind::Math { .. } => "math",
            RewardKind::VerlGsm8k { .. } => "verl_gsm8k",
            RewardKind::VerlMath {} => "verl_math",
            RewardKind::TrlAccuracy {} => "trl_accuracy",
            RewardKind::TrlThinkFormat {} => "trl_think_format",
            RewardKind::Format { .. } => "format",
            RewardKind::JsonSchema { .. } => "json_schema",
            RewardKind::Choice { .. } => "choice",
            RewardKind::Countdown { .. } => "countdown",
            RewardKind::Repetition { .. } => "repetition",
            RewardKind::Length { .. } => "length",
            RewardKind::Model(_) => "model",
            RewardKind::Python(_) => "python",
            RewardKind::Command(_) => "command",
        };
        self.options.name.as_deref().unwrap_or(kind)
    }
}
