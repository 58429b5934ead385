//! Rule rewards: what a completion is worth, from its text, its length and the ground truth.

mod length;

use regex::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};

use self::length::Length;
use super::error::TaskError;
use super::number::{Decimal, last_flexible, last_marked, last_number, parse_float};
use super::{Completion, Reward};

/// One reward of a task. A task's reward is the weighted sum of all of its rewards.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RewardConfig {
    /// 1 if the number the completion concludes with is the answer (verl's GSM8K rule), else 0.
    Gsm8k {
        /// Which number is the conclusion. verl: `method`.
        #[serde(default)]
        method: Gsm8kMethod,
        /// Factor in the sum (TRL: `reward_weights`).
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
    },
    /// 1 if the completion is the answer, both trimmed, else 0.
    Exact {
        /// Whether upper and lower case are the same.
        #[serde(default)]
        ignore_case: bool,
        /// Factor in the sum.
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
    },
    /// 1 if the completion contains the answer (trimmed), else 0.
    Contains {
        /// Whether upper and lower case are the same.
        #[serde(default)]
        ignore_case: bool,
        /// Factor in the sum.
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
    },
    /// With a capture group: 1 if group 1 of the last match is the answer, both trimmed, else 0.
    /// Without one: 1 if the pattern matches (a format reward), else 0.
    Regex {
        /// The pattern, in Rust's regex syntax; `.` also matches a line break.
        pattern: String,
        /// Factor in the sum.
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
    },
    /// 1 if the last number in the completion is the answer, else 0.
    Number {
        /// Largest absolute difference that still counts as equal.
        #[serde(default = "default_tolerance")]
        tolerance: f64,
        /// Factor in the sum.
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
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
        /// Factor in the sum.
        #[serde(default = "one")]
        weight: f64,
        /// Name in metrics and samples; the kind if absent.
        #[serde(default)]
        name: Option<String>,
    },
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

fn one() -> f64 {
    1.0
}

fn default_tolerance() -> f64 {
    1e-6
}

impl RewardConfig {
    /// The name in metrics and samples.
    #[must_use]
    pub fn name(&self) -> &str {
        let (name, kind) = match self {
            Self::Gsm8k { name, .. } => (name, "gsm8k"),
            Self::Exact { name, .. } => (name, "exact"),
            Self::Contains { name, .. } => (name, "contains"),
            Self::Regex { name, .. } => (name, "regex"),
            Self::Number { name, .. } => (name, "number"),
            Self::Length { name, .. } => (name, "length"),
        };
        name.as_deref().unwrap_or(kind)
    }

    /// The factor in the sum.
    #[must_use]
    pub fn weight(&self) -> f64 {
        match self {
            Self::Gsm8k { weight, .. }
            | Self::Exact { weight, .. }
            | Self::Contains { weight, .. }
            | Self::Regex { weight, .. }
            | Self::Number { weight, .. }
            | Self::Length { weight, .. } => *weight,
        }
    }

    fn rule(&self) -> Result<Rule, TaskError> {
        let setting = |key: &str| format!("rewards.{}.{key}", self.name());
        Ok(match self {
            Self::Gsm8k { method, .. } => Rule::Gsm8k(*method),
            Self::Exact { ignore_case, .. } => Rule::Exact {
                ignore_case: *ignore_case,
            },
            Self::Contains { ignore_case, .. } => Rule::Contains {
                ignore_case: *ignore_case,
            },
            Self::Regex { pattern, .. } => Rule::Regex(compile(pattern, &setting("pattern"))?),
            Self::Number { tolerance, .. } if tolerance.is_finite() && *tolerance >= 0.0 => {
                Rule::Number {
                    tolerance: *tolerance,
                }
            }
            Self::Number { tolerance, .. } => {
                let detail = format!("expected a number that is not negative, found {tolerance}");
                return Err(TaskError::config(setting("tolerance"), detail));
            }
            Self::Length {
                target,
                max,
                buffer,
                ..
            } => Rule::Length(Length::new(
                *target,
                *max,
                *buffer,
                &format!("rewards.{}", self.name()),
            )?),
        })
    }
}

/// Compiles a user's pattern. Completions have many lines, so `.` matches line breaks too.
pub(crate) fn compile(pattern: &str, setting: &str) -> Result<Regex, TaskError> {
    RegexBuilder::new(pattern)
        .dot_matches_new_line(true)
        .build()
        .map_err(|error| {
            TaskError::Regex {
                setting: setting.to_owned(),
                pattern: pattern.to_owned(),
                // The compiler's own message repeats the pattern over several lines; the last says
                // what is wrong.
                detail: error
                    .to_string()
                    .lines()
                    .last()
                    .unwrap_or_default()
                    .trim()
                    .to_owned(),
            }
        })
}

#[derive(Clone, Debug)]
enum Rule {
    Gsm8k(Gsm8kMethod),
    Exact { ignore_case: bool },
    Contains { ignore_case: bool },
    Regex(Regex),
    Number { tolerance: f64 },
    Length(Length),
}

impl Rule {
    /// Whether the rule compares with the ground truth at all.
    fn needs_answer(&self) -> bool {
        match self {
            Self::Gsm8k(_) | Self::Exact { .. } | Self::Contains { .. } | Self::Number { .. } => {
                true
            }
            Self::Regex(pattern) => pattern.captures_len() > 1,
            Self::Length(_) => false,
        }
    }

    /// The part's value, or why this sample cannot be judged.
    fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<f64, String> {
        let text = completion.text;
        let right = match self {
            Self::Gsm8k(method) => {
                let answer = Decimal::parse(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a decimal number; \
                         for GSM8K rows set `answer_extract: gsm8k`"
                    )
                })?;
                let found = match method {
                    Gsm8kMethod::Strict => last_marked(text),
                    Gsm8kMethod::Flexible => last_flexible(text),
                };
                found.and_then(Decimal::parse) == Some(answer)
            }
            Self::Exact { ignore_case } => {
                fold(text.trim(), *ignore_case) == fold(answer.trim(), *ignore_case)
            }
            Self::Contains { ignore_case } => {
                let answer = answer.trim();
                if answer.is_empty() {
                    return Err("the ground truth is empty, and every text contains it".to_owned());
                }
                fold(text, *ignore_case).contains(&fold(answer, *ignore_case))
            }
            Self::Regex(pattern) if self.needs_answer() => {
                let last = pattern.captures_iter(text).last();
                let group = last.and_then(|c| c.get(1));
                group.is_some_and(|g| g.as_str().trim() == answer.trim())
            }
            Self::Regex(pattern) => pattern.is_match(text),
            Self::Number { tolerance } => {
                let answer = parse_float(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a number; set \
                         `answer_extract` to take it out of a longer text"
                    )
                })?;
                last_number(text).is_some_and(|found| (found - answer).abs() <= *tolerance)
            }
            Self::Length(length) => return length.penalty(completion),
        };
        Ok(if right { 1.0 } else { 0.0 })
    }
}

fn fold(text: &str, ignore_case: bool) -> String {
    if ignore_case {
        text.to_lowercase()
    } else {
        text.to_owned()
    }
}

/// Rewards ready to judge: patterns compiled, settings checked.
#[derive(Clone, Debug)]
pub struct Rewards {
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    name: String,
    weight: f64,
    rule: Rule,
}

impl Rewards {
    /// Checks and compiles a list of rewards. The list must not be empty, nor name two rewards
    /// alike.
    pub fn new(configs: &[RewardConfig]) -> Result<Self, TaskError> {
        if configs.is_empty() {
            let detail = "expected at least one reward, found none; for example `- kind: exact`";
            return Err(TaskError::config("rewards", detail));
        }
        let mut parts: Vec<Part> = Vec::with_capacity(configs.len());
        for config in configs {
            let name = config.name().to_owned();
            if parts.iter().any(|part| part.name == name) {
                let detail = format!("two rewards are named `{name}`; give one another `name`");
                return Err(TaskError::config("rewards", detail));
            }
            if !config.weight().is_finite() {
                let detail = format!("expected a finite number, found {}", config.weight());
                return Err(TaskError::config(format!("rewards.{name}.weight"), detail));
            }
            parts.push(Part {
                weight: config.weight(),
                rule: config.rule()?,
                name,
            });
        }
        Ok(Self { parts })
    }

    /// The first reward that compares with a ground truth, if any does.
    #[must_use]
    pub fn needs_answer(&self) -> Option<&str> {
        self.parts
            .iter()
            .find(|part| part.rule.needs_answer())
            .map(|part| part.name.as_str())
    }

    /// Whether a ground truth is one that every reward can compare with, so that a broken row is
    /// found when it is loaded and not after hours of training.
    pub(crate) fn check_answer(&self, answer: &str) -> Result<(), TaskError> {
        let nothing = Completion {
            text: "",
            tokens: &[],
            finished: true,
            max_tokens: usize::MAX,
        };
        self.score(answer, &nothing).map(|_| ())
    }

    /// Judges a completion. An error means that the sample cannot be judged (its ground truth is
    /// not what a reward compares with), never that the completion is wrong.
    pub fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let mut reward = Reward {
            total: 0.0,
            parts: Vec::with_capacity(self.parts.len()),
            weights: self.parts.iter().map(|part| part.weight).collect(),
        };
        for part in &self.parts {
            let value =
                part.rule
                    .score(answer, completion)
                    .map_err(|reason| TaskError::Reward {
                        reward: part.name.clone(),
                        reason,
                    })?;
            reward.total += part.weight * value;
            reward.parts.push((part.name.clone(), value));
        }
        Ok(reward)
    }
}

#[cfg(test)]
mod tests;
