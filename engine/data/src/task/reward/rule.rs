//! The rules by their settings: what each reads, what it pays, and what it refuses to judge.

use super::choice::Choice;
use super::config::{Gsm8kMethod, RewardKind};
use super::countdown::{self, CountdownProblem, Reached};
use super::format::{Format, trl_think_format};
use super::length::Length;
use super::math;
use super::pattern::compile;
use super::repetition::Repetition;
use super::schema::Schema;
use super::verdict::RuleVerdict;
use super::verl;
use crate::task::number::{Decimal, last_flexible, last_marked, last_number, last_number_text, parse_float};
use crate::task::{Completion, TaskError};
use math_answer::{AnswerSource, Checker};
use regex::Regex;
use std::borrow::Cow;

/// A rule, its settings checked and its patterns compiled.
#[derive(Clone, Debug)]
pub(crate) enum Rule {
    Gsm8k(Gsm8kMethod),
    Exact { ignore_case: bool },
    Contains { ignore_case: bool },
    Regex(Regex),
    Number { tolerance: f64 },
    Math(Checker),
    VerlGsm8k { method: Gsm8kMethod, format_score: f64 },
    VerlMath,
    ThinkFormat,
    Format(Format),
    JsonSchema(Schema),
    Choice(Choice),
    Countdown { use_all: bool },
    Repetition(Repetition),
    Length(Length),
}

impl Rule {
    /// The rule of a setting; `setting` is the reward's name in messages. A reward model is none.
    pub fn new(kind: &RewardKind, setting: &str) -> Result<Self, TaskError> {
        let size = |key: &str, size: f64| {
            if size.is_finite() && size >= 0.0 {
                return Ok(size);
            }
            let detail = format!("expected a non-negative number, found {size}");
            Err(TaskError::config(format!("{setting}.{key}"), detail))
        };
        let math = |source, tolerance| Self::Math(Checker { source, tolerance });
        Ok(match kind {
            RewardKind::Gsm8k { method } => Self::Gsm8k(*method),
            RewardKind::Exact { ignore_case } => Self::Exact { ignore_case: *ignore_case },
            RewardKind::Contains { ignore_case } => Self::Contains { ignore_case: *ignore_case },
            RewardKind::Regex { pattern } => Self::Regex(compile(pattern, &format!("{setting}.pattern"))?),
            RewardKind::Number { tolerance } => Self::Number { tolerance: size("tolerance", *tolerance)? },
            RewardKind::Math { tolerance } => math(AnswerSource::Any, size("tolerance", *tolerance)?),
            RewardKind::VerlGsm8k { method, format_score } => {
                Self::VerlGsm8k { method: *method, format_score: size("format_score", *format_score)? }
            }
            RewardKind::VerlMath {} => Self::VerlMath,
            RewardKind::TrlAccuracy {} => math(AnswerSource::Latex, 0.0),
            RewardKind::TrlThinkFormat {} => Self::ThinkFormat,
            RewardKind::Format { tags, only, opened } => Self::Format(Format::new(tags, *only, *opened, setting)?),
            RewardKind::JsonSchema { schema } => Self::JsonSchema(Schema::new(schema, setting)?),
            RewardKind::Choice { letters } => Self::Choice(Choice::new(letters, setting)?),
            RewardKind::Countdown { use_all } => Self::Countdown { use_all: *use_all },
            RewardKind::Repetition { ngram_size, unit } => {
                Self::Repetition(Repetition::new(*ngram_size, *unit, setting)?)
            }
            RewardKind::Length { target, max, buffer, limit } => {
                Self::Length(Length::new(*target, *max, *buffer, *limit, setting)?)
            }
            RewardKind::Model(_) | RewardKind::Python(_) | RewardKind::Command(_) => {
                let detail = "a reward model or program is not a rule";
                return Err(TaskError::config(setting, detail));
            }
        })
    }

    /// Whether the rule compares with the ground truth at all.
    pub fn needs_answer(&self) -> bool {
        match self {
            Self::Gsm8k(_)
            | Self::Exact { .. }
            | Self::Contains { .. }
            | Self::Number { .. }
            | Self::Math(_)
            | Self::VerlGsm8k { .. }
            | Self::VerlMath
            | Self::Choice(_)
            | Self::Countdown { .. } => true,
            Self::Regex(pattern) => pattern.captures_len() > 1,
            Self::ThinkFormat | Self::Format(_) | Self::JsonSchema(_) | Self::Repetition(_) | Self::Length(_) => false,
        }
    }

    /// Whether the rule compares one piece of the text with the ground truth.
    pub fn reads(&self) -> bool {
        self.needs_answer() && !matches!(self, Self::Contains { .. })
    }

    /// Whether the rule reads what follows a completion's reasoning: nothing where that has not ended. Those of TRL and
    /// verl are as theirs.
    fn follows_thought(&self) -> bool {
        match self {
            Self::Math(math) => math.source == AnswerSource::Any,
            Self::Gsm8k(_) | Self::Number { .. } | Self::JsonSchema(_) | Self::Choice(_) | Self::Countdown { .. } => {
                true
            }
            Self::Exact { .. }
            | Self::Contains { .. }
            | Self::Regex(_)
            | Self::VerlGsm8k { .. }
            | Self::VerlMath
            | Self::ThinkFormat
            | Self::Format(_)
            | Self::Repetition(_)
            | Self::Length(_) => false,
        }
    }

    /// The piece of a completion that a rule which [`reads`](Self::reads) compares with the ground truth, if it finds
    /// one.
    pub fn reading<'t>(&self, text: &'t str) -> Option<Cow<'t, str>> {
        match self {
            Self::Gsm8k(Gsm8kMethod::Strict) => last_marked(text).map(Cow::Borrowed),
            Self::Gsm8k(Gsm8kMethod::Flexible) => last_flexible(text).map(Cow::Borrowed),
            Self::Exact { .. } => Some(Cow::Borrowed(text.trim())),
            Self::Regex(pattern) => {
                let last = pattern.captures_iter(text).last();
                let group = last.and_then(|c| c.get(1));
                group.map(|group| Cow::Borrowed(group.as_str()))
            }
            Self::Number { .. } => last_number_text(text).map(Cow::Borrowed),
            Self::Math(math) => math.read(text).map(Cow::Owned),
            Self::VerlGsm8k { method, .. } => verl::gsm8k_answer(text, *method).map(Cow::Owned),
            Self::VerlMath => verl::math_answer(text).map(Cow::Borrowed),
            Self::Choice(choice) => choice.find(text).map(|c| Cow::Owned(c.to_string())),
            Self::Countdown { .. } => countdown::find(text).map(Cow::Borrowed),
            Self::Contains { .. }
            | Self::ThinkFormat
            | Self::Format(_)
            | Self::JsonSchema(_)
            | Self::Repetition(_)
            | Self::Length(_) => None,
        }
    }

    /// A completion that says the ground truth in the form that the rule reads, where there is such a form.
    pub fn own_gold(&self, answer: &str) -> Option<String> {
        Some(match self {
            Self::Gsm8k(_) | Self::VerlGsm8k { .. } => format!("#### {}", answer.trim()),
            Self::Exact { .. } | Self::Contains { .. } | Self::Number { .. } => answer.to_owned(),
            Self::Math(_) => math::own_gold(answer),
            Self::VerlMath => format!("\\boxed{{{answer}}}"),
            Self::Choice(_) => format!("\\boxed{{{}}}", answer.trim()),
            // what a pattern wants around its group, and which expression reaches a target, is not known
            Self::Regex(_)
            | Self::Countdown { .. }
            | Self::ThinkFormat
            | Self::Format(_)
            | Self::JsonSchema(_)
            | Self::Repetition(_)
            | Self::Length(_) => return None,
        })
    }

    /// What the rule says of a completion, or why this sample cannot be judged.
    pub fn judge(&self, answer: &str, completion: &Completion<'_>) -> Result<RuleVerdict, String> {
        let text = if self.follows_thought() { completion.answering() } else { completion.text };
        let paid = |right: bool| RuleVerdict::value(if right { 1.0 } else { 0.0 });
        Ok(match self {
            Self::Math(checker) => math::judge(*checker, answer, text)?,
            Self::ThinkFormat => paid(trl_think_format(text)),
            Self::Format(format) => paid(format.matches(text)),
            Self::JsonSchema(schema) => {
                let json = Schema::find(text);
                let mut verdict = RuleVerdict::of(schema.fits(json), Some(json), "");
                verdict.gold = None;
                verdict
            }
            Self::Regex(pattern) if !self.needs_answer() => paid(pattern.is_match(text)),
            Self::Repetition(repetition) => RuleVerdict::value(repetition.penalty(text, completion.tokens)),
            Self::Length(length) => RuleVerdict::value(length.penalty(completion)?),
            Self::VerlGsm8k { format_score, .. } => {
                let found = self.reading(text);
                let mut verdict = RuleVerdict::of(found.as_deref() == Some(answer), found.as_deref(), answer);
                if found.is_some() && verdict.value < 1.0 {
                    verdict.value = *format_score;
                }
                verdict
            }
            _ => {
                let found = self.reading(text);
                RuleVerdict::of(self.right(answer, text, found.as_deref())?, found.as_deref(), answer)
            }
        })
    }

    /// Whether what was found is the answer, for the rules that pay 1 or 0 for that.
    fn right(&self, answer: &str, text: &str, found: Option<&str>) -> Result<bool, String> {
        Ok(match self {
            Self::Gsm8k(_) => {
                let answer = Decimal::parse(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a decimal number; \
                         for GSM8K rows set `answer_extract: gsm8k`"
                    )
                })?;
                found.and_then(Decimal::parse) == Some(answer)
            }
            Self::Exact { ignore_case } => fold(text.trim(), *ignore_case) == fold(answer.trim(), *ignore_case),
            Self::Contains { ignore_case } => {
                let answer = answer.trim();
                if answer.is_empty() {
                    return Err("the ground truth is empty, which every text contains".to_owned());
                }
                fold(text, *ignore_case).contains(&fold(answer, *ignore_case))
            }
            Self::Number { tolerance } => {
                let answer = parse_float(answer).ok_or_else(|| {
                    format!(
                        "the ground truth {answer:?} is not a number; set `answer_extract` to extract it from a longer text"
                    )
                })?;
                last_number(text).is_some_and(|found| (found - answer).abs() <= *tolerance)
            }
            Self::VerlMath => found.is_some_and(|found| verl::is_equiv(found, answer)),
            Self::Choice(choice) => {
                let gold = choice.gold(answer)?;
                choice.find(text) == Some(gold)
            }
            Self::Countdown { use_all } => {
                let problem = CountdownProblem::parse(answer)?;
                found.is_some_and(|found| problem.reached(found, *use_all) == Reached::Target)
            }
            _ => found.is_some_and(|found| found.trim() == answer.trim()),
        })
    }
}

fn fold(text: &str, ignore_case: bool) -> String {
    if ignore_case { text.to_lowercase() } else { text.to_owned() }
}

#[cfg(test)]
mod tests;
