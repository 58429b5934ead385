//! Settings of a task's `rewards` list: scorers and options.

use std::borrow::Cow;
use std::path::PathBuf;

use firebrick_backends::DeviceSpec;
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use smart_default::SmartDefault;

use super::program::{CommandRewardConfig, PythonRewardConfig};
use firebrick_plan::ParamOffload;

/// One reward of a task. A task's reward is the weighted sum of all of its rewards.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RewardConfig {
    /// The scorer.
    #[serde(flatten)]
    pub kind: RewardKind,
    /// Its place in the sum.
    #[serde(flatten)]
    pub options: RewardOptions,
}

/// Rule, model or program that scores a completion.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema, strum::IntoStaticStr)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[strum(serialize_all = "snake_case")]
pub enum RewardKind {
    /// verl's GSM8K rule: a number in the last 300 characters equals the answer, compared as decimals.
    Gsm8k {
        /// How the number is found.
        #[serde(default)]
        method: Gsm8kMethod,
    },
    /// The trimmed completion equals the answer.
    Exact {
        /// Ignore case.
        #[serde(default)]
        ignore_case: bool,
    },
    /// The completion contains the answer.
    Contains {
        /// Ignore case.
        #[serde(default)]
        ignore_case: bool,
    },
    /// Group 1 of the last match equals the answer; without a group, the pattern matches anywhere.
    Regex {
        /// Pattern in the syntax of Rust's `regex`; `.` matches line breaks.
        pattern: String,
    },
    /// The last number in the completion equals the answer.
    Number {
        /// Largest difference that counts as equal: absolute in `number`, relative in `math`.
        #[serde(default = "default_tolerance")]
        #[schemars(range(min = 0))]
        tolerance: f64,
    },
    /// The answer equals the ground truth mathematically. It is read from the last `\boxed{}`, after `####` or `answer
    /// is`, or from the last line.
    Math {
        /// Largest relative difference that counts as equal; 0 is exact.
        #[serde(default)]
        #[schemars(range(min = 0))]
        tolerance: f64,
    },
    /// verl's `gsm8k.compute_score`, which compares strings.
    VerlGsm8k {
        /// How the number is found.
        #[serde(default)]
        method: Gsm8kMethod,
        /// Score of a different number.
        #[serde(default)]
        #[schemars(range(min = 0))]
        format_score: f64,
    },
    /// verl's `math_reward.compute_score`: the last `\boxed{}` equals the answer after MATH's normalization.
    VerlMath {},
    /// TRL's `accuracy_reward`: `math` for the last `\boxed{}` or the formula after `final answer is`.
    TrlAccuracy {},
    /// TRL's `think_format_reward`: one `<think>`, at the start, and `</think>` after it.
    TrlThinkFormat {},
    /// The completion has the tags in order, each once.
    Format {
        /// Tag names: `[think, answer]`.
        #[schemars(length(min = 1), extend("items" = {"type": "string", "pattern": "^[^<>/]+$", "examples": ["think"]}))]
        tags: Vec<String>,
        /// Allow only whitespace outside the tags.
        #[serde(default = "yes")]
        only: bool,
        /// The prompt ends with the first opening tag.
        #[serde(default)]
        opened: bool,
    },
    /// The text after `</think>`, or its last fenced code block, is JSON that matches a schema.
    JsonSchema {
        /// JSON Schema, without remote references, look-around or back-references.
        schema: Value,
    },
    /// The chosen letter is the answer. It is read from the last `\boxed{}`, the last answer line, or the start of the
    /// last line.
    Choice {
        /// Possible letters.
        #[serde(default = "default_letters")]
        letters: String,
    },
    /// The expression reaches the target with the given integers; the answer is `{"target": 24, "numbers": [2, 3, 4]}`.
    Countdown {
        /// Every integer must be used.
        #[serde(default = "yes")]
        use_all: bool,
    },
    /// From 0 to −1: minus the fraction of repeated n-grams.
    Repetition {
        /// Units per n-gram.
        #[serde(default = "default_ngram")]
        #[schemars(range(min = 1, max = 64))]
        ngram_size: usize,
        /// Unit of n-grams.
        #[serde(default)]
        unit: RepetitionUnit,
    },
    /// From 0 to −1 by the length in tokens. Set one of `target`, `max` and `buffer`.
    Length {
        /// Length that scores 0, falling linearly to −1 at zero and at twice this length.
        #[serde(default)]
        #[schemars(range(min = 1))]
        target: Option<usize>,
        /// Maximum length that scores 0; longer completions score −1.
        #[serde(default)]
        #[schemars(range(min = 1))]
        max: Option<usize>,
        /// Tokens before `rollout.response_length` over which the score falls from 0 to −1 (DAPO's soft overlong
        /// penalty).
        #[serde(default)]
        #[schemars(range(min = 1))]
        buffer: Option<usize>,
        /// With `buffer`: length that scores −1, instead of `rollout.response_length`; longer completions score less.
        #[serde(default)]
        limit: Option<usize>,
    },
    /// Score of a reward model: a `…ForSequenceClassification` checkpoint with one label.
    Model(RewardModelConfig),
    /// A Python function written for TRL or verl.
    Python(PythonRewardConfig),
    /// A program that reads and writes JSON lines.
    Command(CommandRewardConfig),
}

/// A reward model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// Checkpoint folder or Hub model of the reward model.
    pub path: PathBuf,
    /// Device of the reward model. `null`: the run's.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub device: Option<DeviceSpec>,
    /// Form of the reward model's input.
    #[serde(default)]
    pub input: RewardInput,
    /// Maximum tokens per batch of the reward model. `null`: `memory.score_tokens`.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub score_tokens: Option<usize>,
    /// Location of the reward model's weights.
    #[serde(default)]
    pub param_offload: ParamOffload,
}

/// Form of a reward model's input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RewardInput {
    /// `chat` for conversations if the reward model has a chat template, else `text`.
    #[default]
    Auto,
    /// The conversation in the reward model's chat template. A plain-text prompt is the user's turn.
    Chat,
    /// Text of prompt and completion, with the reward model's tokenizer.
    Text,
    /// The policy's token ids; needs the same vocabulary.
    Tokens,
}

/// Options of every reward: it counts as `weight · clip(normalize(value))`.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewardOptions {
    /// Factor in the sum; may be negative.
    #[default(1.0)]
    pub weight: f64,
    /// Unique name in metrics and samples. `null`: the `kind`.
    pub name: Option<String>,
    /// In training, subtract the run's mean so far and divide by its standard deviation.
    pub normalize: bool,
    /// In training, clip values to `[low, high]` after normalization.
    pub clip: Option<[f64; 2]>,
}

/// The keys of [`RewardOptions`], which are flattened with those of the kind.
const OPTIONS: [&str; 4] = ["weight", "name", "normalize", "clip"];

/// How the number that a completion concludes with is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Gsm8kMethod {
    /// The last number written `#### 42`.
    #[default]
    Strict,
    /// The last number.
    Flexible,
}

/// Unit of n-grams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RepetitionUnit {
    /// Words in lower case.
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
    /// Serde's `flatten` accepts unknown keys, so the options are split off first.
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

    /// The options' keys next to those of every kind.
    fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let mut kinds = <RewardKind as schemars::JsonSchema>::json_schema(generator);
        let options = <RewardOptions as schemars::JsonSchema>::json_schema(generator);
        let options = options.get("properties").and_then(Value::as_object);
        for kind in kinds.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten() {
            let keys = kind.get_mut("properties").and_then(Value::as_object_mut);
            if let (Some(keys), Some(options)) = (keys, options) {
                keys.extend(options.clone());
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
    pub fn name(&self) -> &str {
        self.options.name.as_deref().unwrap_or_else(|| (&self.kind).into())
    }
}
