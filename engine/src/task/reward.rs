//! What a completion is worth: rules on its text, its length and the ground truth, reward models, and their weighted sum.

mod config;
mod length;
mod running;

use regex::{Regex, RegexBuilder};

pub use self::config::{
    Gsm8kMethod, RewardConfig, RewardInput, RewardKind, RewardModelConfig, RewardOptions,
};
use self::length::Length;
pub use self::running::{Running, Shaping};
use super::error::TaskError;
use super::number::{
    Decimal, last_flexible, last_marked, last_number, last_number_text, parse_float,
};
use super::{Completion, Reward};

impl RewardConfig {
    fn judge(&self) -> Result<Grader, TaskError> {
        let setting = |key: &str| format!("rewards.{}.{key}", self.name());
        let rule = match &self.kind {
            RewardKind::Gsm8k { method } => Rule::Gsm8k(*method),
            RewardKind::Exact { ignore_case } => Rule::Exact {
                ignore_case: *ignore_case,
            },
            RewardKind::Contains { ignore_case } => Rule::Contains {
                ignore_case: *ignore_case,
            },
            RewardKind::Regex { pattern } => Rule::Regex(compile(pattern, &setting("pattern"))?),
            RewardKind::Number { tolerance } if tolerance.is_finite() && *tolerance >= 0.0 => {
                Rule::Number {
                    tolerance: *tolerance,
                }
            }
            RewardKind::Number { tolerance } => {
                let detail = format!("expected a non-negative number, found {tolerance}");
                return Err(TaskError::config(setting("tolerance"), detail));
            }
            RewardKind::Length {
                target,
                max,
                buffer,
            } => Rule::Length(Length::new(
                *target,
                *max,
                *buffer,
                &format!("rewards.{}", self.name()),
            )?),
            RewardKind::Model(model) => {
                if model.score_tokens == Some(0) {
                    let detail = "expected at least 1 token, found 0";
                    return Err(TaskError::config(setting("score_tokens"), detail));
                }
                return Ok(Grader::Model(model.clone()));
            }
        };
        Ok(Grader::Rule(rule))
    }

    /// Refuses options that make no sense, whatever judges.
    fn check(&self) -> Result<(), TaskError> {
        let setting = |key: &str| format!("rewards.{}.{key}", self.name());
        let RewardOptions { weight, clip, .. } = &self.options;
        if !weight.is_finite() {
            let detail = format!("expected a finite number, found {weight}");
            return Err(TaskError::config(setting("weight"), detail));
        }
        match clip {
            Some([low, high]) if !low.is_finite() || !high.is_finite() || low >= high => {
                let detail = format!(
                    "expected two finite numbers in ascending order, found [{low}, {high}]"
                );
                Err(TaskError::config(setting("clip"), detail))
            }
            _ => Ok(()),
        }
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

    /// Whether the rule compares one piece of the text with the ground truth.
    fn reads(&self) -> bool {
        self.needs_answer() && !matches!(self, Self::Contains { .. })
    }

    /// The piece of a completion that a rule which [`reads`](Self::reads) compares with the ground truth, if it finds one.
    fn reading<'t>(&self, text: &'t str) -> Option<&'t str> {
        match self {
            Self::Gsm8k(Gsm8kMethod::Strict) => last_marked(text),
            Self::Gsm8k(Gsm8kMethod::Flexible) => last_flexible(text),
            Self::Exact { .. } => Some(text.trim()),
            Self::Regex(pattern) => {
                let last = pattern.captures_iter(text).last();
                last.and_then(|c| c.get(1)).map(|group| group.as_str())
            }
            Self::Number { .. } => last_number_text(text),
            Self::Contains { .. } | Self::Length(_) => None,
        }
    }

    /// The part's value, or why this sample cannot be judged.
    fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<f64, String> {
        let text = completion.text;
        let right = match self {
            Self::Gsm8k(_) => {
                let answer = Decimal::parse(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a decimal number; \
                         for GSM8K rows set `answer_extract: gsm8k`"
                    )
                })?;
                let found = self.reading(text);
                found.and_then(Decimal::parse) == Some(answer)
            }
            Self::Exact { ignore_case } => {
                fold(text.trim(), *ignore_case) == fold(answer.trim(), *ignore_case)
            }
            Self::Contains { ignore_case } => {
                let answer = answer.trim();
                if answer.is_empty() {
                    return Err("the ground truth is empty, which every text contains".to_owned());
                }
                fold(text, *ignore_case).contains(&fold(answer, *ignore_case))
            }
            Self::Regex(_) if self.needs_answer() => {
                let group = self.reading(text);
                group.is_some_and(|group| group.trim() == answer.trim())
            }
            Self::Regex(pattern) => pattern.is_match(text),
            Self::Number { tolerance } => {
                let answer = parse_float(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a number; set `answer_extract` to extract it from a longer text"
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
    options: RewardOptions,
    judge: Grader,
}

#[derive(Clone, Debug)]
enum Grader {
    Rule(Rule),
    Model(RewardModelConfig),
}

impl Part {
    fn rule(&self) -> Option<&Rule> {
        match &self.judge {
            Grader::Rule(rule) => Some(rule),
            Grader::Model(_) => None,
        }
    }

    fn model(&self) -> Option<&RewardModelConfig> {
        match &self.judge {
            Grader::Rule(_) => None,
            Grader::Model(model) => Some(model),
        }
    }
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
                let detail = format!(
                    "two rewards are named `{name}`; set a different `name` for one of them"
                );
                return Err(TaskError::config("rewards", detail));
            }
            config.check()?;
            parts.push(Part {
                options: config.options.clone(),
                judge: config.judge()?,
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
            .find(|part| part.rule().is_some_and(Rule::needs_answer))
            .map(|part| part.name.as_str())
    }

    /// Name and settings of every reward model, in the order of the list.
    pub fn models(&self) -> impl Iterator<Item = (&str, &RewardModelConfig)> {
        let parts = self.parts.iter();
        parts.filter_map(|part| Some((part.name.as_str(), part.model()?)))
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

    /// Judges a completion by the rules of the list; what its models say comes later, for many completions at a time
    /// ([`Rewards::complete`]). An error means that the sample cannot be judged (its ground truth is not what a reward
    /// compares with), never that the completion is wrong.
    pub fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let mut reward = Reward::default();
        for part in &self.parts {
            let Some(rule) = part.rule() else { continue };
            let value = rule
                .score(answer, completion)
                .map_err(|reason| TaskError::Reward {
                    reward: part.name.clone(),
                    reason,
                })?;
            reward.add(&part.name, value, part.options.weight);
        }
        Ok(reward)
    }

    /// What each rule that compares one piece of the text with the ground truth reads in a completion: its name, and the piece if
    /// it found one.
    pub fn readings<'t>(
        &'t self,
        text: &'t str,
    ) -> impl Iterator<Item = (&'t str, Option<&'t str>)> + 't {
        let rules = self.parts.iter();
        rules.filter_map(|part| {
            let rule = part.rule().filter(|rule| rule.reads())?;
            Some((part.name.as_str(), rule.reading(text)))
        })
    }

    /// Puts the models' scores (one list a model, in the order of [`Rewards::models`], one number a completion) between the
    /// rules', and makes the sums.
    pub fn complete(&self, rewards: &mut [Reward], models: &[Vec<f64>], shaping: Shaping<'_>) {
        let mut models = models.iter();
        for (place, part) in self.parts.iter().enumerate() {
            if part.model().is_none() {
                continue;
            }
            let Some(scores) = models.next() else {
                unreachable!("one list of scores a model")
            };
            for (reward, &score) in rewards.iter_mut().zip(scores) {
                reward.parts.insert(place, (part.name.clone(), score));
                reward.weights.insert(place, part.options.weight);
            }
        }
        for reward in rewards.iter_mut() {
            reward.total = 0.0;
        }
        let mut shaping = shaping;
        for (place, part) in self.parts.iter().enumerate() {
            let values: Vec<f64> = rewards.iter().map(|r| r.parts[place].1).collect();
            let shaped = shaping.of(&part.name, &part.options, &values);
            for (reward, value) in rewards.iter_mut().zip(shaped) {
                reward.total += part.options.weight * value;
            }
        }
    }

    /// Whether training changes any value before it is weighted.
    #[must_use]
    pub fn shapes(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| part.options.normalize || part.options.clip.is_some())
    }
}

#[cfg(test)]
mod tests;
