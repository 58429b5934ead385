//! Rewards: rules on a completion's text, its length and the ground truth, reward models, programs, and their
//! weighted sum.

mod choice;
mod config;
mod countdown;
mod format;
mod length;
mod math;
mod number;
mod program;
mod repetition;
mod running;
mod schema;
mod text;
mod verl;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

pub use self::config::{
    Gsm8kMethod, RepetitionUnit, RewardConfig, RewardInput, RewardKind, RewardModelConfig, RewardOptions,
};
pub(crate) use self::countdown::{CountdownProblem, Reached, find as countdown_answer};
pub use self::program::{CommandRewardConfig, PythonRewardConfig, RewardProgram};
pub use self::running::{RewardStats, RunningStats};
pub(crate) use self::text::compile;
use super::error::TaskError;
use super::{Completion, Reading, Reward, Score};
use math_answer::AnswerSource;

/// Reads the answer in a text.
type Read = dyn for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync;

/// Scores a completion, or returns the reason why it cannot.
type ScoreFn = dyn Fn(&Case<'_>) -> Result<Score, String> + Send + Sync;

/// A completion with its ground truth.
struct Case<'a> {
    pub answer: &'a str,
    /// The text that the rule reads.
    pub text: &'a str,
    pub completion: &'a Completion<'a>,
}

/// A rule, its settings checked and its patterns compiled.
#[derive(Clone)]
pub struct Rule {
    /// True if it compares with the ground truth.
    needs_answer: bool,
    /// True if it reads only the text after the reasoning.
    after_thought: bool,
    /// Reads the answer that is compared with the ground truth, if it does.
    read: Option<Arc<Read>>,
    /// Writes a ground truth as a completion that the rule reads, if there is such a form.
    gold: Option<fn(&str) -> String>,
    score: Arc<ScoreFn>,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rule").field("needs_answer", &self.needs_answer).finish_non_exhaustive()
    }
}

impl Rule {
    /// A rule of the completion alone.
    fn of_completion(score: impl Fn(&Case<'_>) -> Result<Score, String> + Send + Sync + 'static) -> Self {
        Self { needs_answer: false, after_thought: false, read: None, gold: None, score: Arc::new(score) }
    }

    /// A rule that compares with the ground truth.
    fn of_answer(score: impl Fn(&Case<'_>) -> Result<Score, String> + Send + Sync + 'static) -> Self {
        Self { needs_answer: true, ..Self::of_completion(score) }
    }

    /// A rule that reads an answer and compares it with the ground truth. `equal` gets the ground truth
    /// and the answer.
    fn comparing(
        read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Clone + Send + Sync + 'static,
        equal: impl Fn(&str, Option<&str>) -> Result<bool, String> + Send + Sync + 'static,
    ) -> Self {
        let find = read.clone();
        let rule = Self::of_answer(move |case| {
            let parsed = find(case.text);
            let parsed = parsed.as_deref();
            Ok(Score::compared(equal(case.answer, parsed)?, parsed, case.answer))
        });
        rule.reading(read)
    }

    /// Sets the function that reads the answer.
    fn reading(self, read: impl for<'t> Fn(&'t str) -> Option<Cow<'t, str>> + Send + Sync + 'static) -> Self {
        Self { read: Some(Arc::new(read)), ..self }
    }

    /// Sets the function that writes a ground truth as a completion.
    fn gold(self, gold: fn(&str) -> String) -> Self {
        Self { gold: Some(gold), ..self }
    }

    /// Restricts the rule to the text after the reasoning. The rules of TRL and verl are not restricted.
    fn after_thought(self) -> Self {
        Self { after_thought: true, ..self }
    }

    /// The answer that the rule reads in a text, if there is one.
    fn read<'t>(&self, text: &'t str) -> Option<Cow<'t, str>> {
        self.read.as_ref()?(text)
    }

    /// The score of a completion, or the reason why it cannot be scored.
    fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Score, String> {
        let text = if self.after_thought { completion.answering() } else { completion.text };
        (self.score)(&Case { answer, text, completion })
    }
}

/// A scorer of completions.
#[derive(Clone, Debug)]
pub enum Scorer {
    /// A function of a completion's text and tokens.
    Rule(Rule),
    /// A reward model, which scores a step's completions together.
    Model(RewardModelConfig),
    /// Another program, which scores a prompt's completions together.
    Program(RewardProgram),
}

/// Scores of a reward model or a program: its place in the list of rewards, and a score per completion.
pub type Scores = (usize, Vec<Score>);

impl RewardConfig {
    fn scorer(&self) -> Result<Scorer, TaskError> {
        let setting = &format!("rewards.{}", self.name());
        Ok(Scorer::Rule(match &self.kind {
            RewardKind::Gsm8k { method } => number::gsm8k(*method),
            RewardKind::Exact { ignore_case } => text::exact(*ignore_case),
            RewardKind::Contains { ignore_case } => text::contains(*ignore_case),
            RewardKind::Regex { pattern } => text::regex(pattern, setting)?,
            RewardKind::Number { tolerance } => number::number(*tolerance),
            RewardKind::Math { tolerance } => math::math(AnswerSource::Any, *tolerance),
            RewardKind::VerlGsm8k { method, format_score } => verl::gsm8k(*method, *format_score),
            RewardKind::VerlMath {} => verl::math(),
            RewardKind::TrlAccuracy {} => math::math(AnswerSource::Latex, 0.0),
            RewardKind::TrlThinkFormat {} => format::trl_think(),
            RewardKind::Format { tags, only, opened } => format::rule(tags, *only, *opened, setting)?,
            RewardKind::JsonSchema { schema } => schema::rule(schema, setting)?,
            RewardKind::Choice { letters } => choice::rule(letters, setting)?,
            RewardKind::Countdown { use_all } => countdown::rule(*use_all),
            RewardKind::Repetition { ngram_size, unit } => repetition::rule(*ngram_size, *unit),
            RewardKind::Length { target, max, buffer, limit } => {
                length::rule([*target, *max, *buffer, *limit], setting)?
            }
            RewardKind::Model(model) => return Ok(Scorer::Model(model.clone())),
            RewardKind::Python(config) => return Ok(Scorer::Program(RewardProgram::Python(config.clone()))),
            RewardKind::Command(config) if config.command.first().is_none_or(String::is_empty) => {
                let detail = "expected a program and its arguments as a list, found none";
                return Err(TaskError::config(format!("{setting}.command"), detail));
            }
            RewardKind::Command(config) => return Ok(Scorer::Program(RewardProgram::Command(config.clone()))),
        }))
    }

    /// An error if the program's file or folder is missing.
    fn missing_file(&self) -> Option<TaskError> {
        let (key, path) = match &self.kind {
            RewardKind::Python(config) => ("file", Some(&config.file)),
            RewardKind::Command(config) => ("folder", config.folder.as_ref()),
            _ => return None,
        };
        let path = path.filter(|path| !path.exists())?;
        let setting = format!("rewards.{}.{key}", self.name());
        let detail = format!("there is no {key} {}", path.display());
        Some(TaskError::config(setting, detail))
    }

    /// Rejects settings out of their range.
    fn check(&self) -> Result<(), TaskError> {
        let section = format!("rewards.{}", self.name());
        TaskError::check(&section, self)?;
        match self.options.clip {
            Some([low, high]) if low >= high => {
                let detail = format!("expected two values in ascending order, found [{low}, {high}]");
                Err(TaskError::config(format!("{section}.clip"), detail))
            }
            _ => Ok(()),
        }
    }
}

/// Rewards ready to score: patterns compiled, settings checked.
#[derive(Clone, Debug, Default)]
pub struct Rewards {
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    name: String,
    options: RewardOptions,
    scorer: Scorer,
}

impl Part {
    fn failed(&self, reason: String) -> TaskError {
        TaskError::Reward { reward: self.name.clone(), reason }
    }

    /// A value for training, normalized and clipped by the options. NaN stays.
    fn shaped(&self, value: f64, statistics: &RewardStats) -> f64 {
        let statistics = statistics.get(&self.name).filter(|_| self.options.normalize);
        let value = statistics.map_or(value, |statistics| statistics.normalize(value));
        self.options.clip.map_or(value, |[low, high]| value.clamp(low, high))
    }
}

impl Rewards {
    /// Checks and compiles a list of rewards. The list must not be empty, nor name two rewards
    /// alike.
    ///
    /// # Errors
    /// `TaskError::Config` for an empty list, two rewards of one name, and invalid settings.
    pub fn new(configs: &[RewardConfig]) -> Result<Self, TaskError> {
        if configs.is_empty() {
            let detail = "expected at least one reward, found none; for example `- kind: exact`";
            return Err(TaskError::config("rewards", detail));
        }
        let mut parts: Vec<Part> = Vec::with_capacity(configs.len());
        for config in configs {
            let name = config.name().to_owned();
            if parts.iter().any(|part| part.name == name) {
                let detail = format!("two rewards are named `{name}`; set a different `name` for one of them");
                return Err(TaskError::config("rewards", detail));
            }
            config.check()?;
            parts.push(Part { options: config.options.clone(), scorer: config.scorer()?, name });
        }
        Ok(Self { parts })
    }

    /// Errors of the entries of a list, each with its index, or else the error of the list.
    pub(crate) fn problems(configs: &[RewardConfig]) -> Vec<(Option<usize>, TaskError)> {
        let mut problems = Vec::new();
        for (at, config) in configs.iter().enumerate() {
            let errors = [config.check().err(), config.scorer().err(), config.missing_file()];
            problems.extend(errors.into_iter().flatten().map(|error| (Some(at), error)));
        }
        if problems.is_empty() {
            problems.extend(Self::new(configs).err().map(|error| (None, error)));
        }
        problems
    }

    /// The first reward that compares with a ground truth, if any does.
    pub fn needs_answer(&self) -> Option<&str> {
        self.rules().find(|(_, rule)| rule.needs_answer).map(|(part, _)| part.name.as_str())
    }

    fn rules(&self) -> impl Iterator<Item = (&Part, &Rule)> {
        self.parts.iter().filter_map(|part| match &part.scorer {
            Scorer::Rule(rule) => Some((part, rule)),
            Scorer::Model(_) | Scorer::Program(_) => None,
        })
    }

    /// Name and scorer of every reward, in the order of the list.
    pub fn scorers(&self) -> impl Iterator<Item = (&str, &Scorer)> {
        self.parts.iter().map(|part| (part.name.as_str(), &part.scorer))
    }

    /// Name and settings of every reward model, in the order of the list.
    pub fn models(&self) -> impl Iterator<Item = (&str, &RewardModelConfig)> {
        self.scorers().filter_map(|(name, scorer)| match scorer {
            Scorer::Model(model) => Some((name, model)),
            Scorer::Rule(_) | Scorer::Program(_) => None,
        })
    }

    /// Checks that every reward can compare with a ground truth, so that a broken row is
    /// found when it is loaded and not after hours of training.
    ///
    /// A rule must score the ground truth itself, in the form that it reads, with 1.
    pub(crate) fn check_answer(&self, answer: &str) -> Result<(), TaskError> {
        self.score(answer, &finished(""))?;
        for (part, rule) in self.rules() {
            let Some(text) = rule.gold.map(|gold| gold(answer)) else { continue };
            let value =
                rule.score(answer, &finished(&text)).map_err(|reason| part.failed(reason))?.value.unwrap_or(0.0);
            if value < 1.0 {
                let read = rule.read(&text);
                return Err(part.failed(format!(
                    "it scores its ground truth {value} instead of 1 (answer {answer:?}, completion {text:?}, parsed as \
                     {}); set `answer_extract`, or use another rule",
                    read.map_or_else(|| "nothing".into(), |read| format!("{read:?}"))
                )));
            }
        }
        Ok(())
    }

    /// Scores a completion by the rules of the list; models and programs score many completions at a time later
    /// ([`Rewards::complete`]). An error means that the sample cannot be scored (its ground truth
    /// is not what a reward compares with), never that the completion is wrong.
    ///
    /// # Errors
    /// `TaskError::Reward` with the reward's name and the reason.
    pub fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let mut reward = Reward::default();
        for (part, rule) in self.rules() {
            let score = rule.score(answer, completion).map_err(|reason| part.failed(reason))?;
            let value = score.value.unwrap_or(f64::NAN);
            reward.add(&part.name, value, part.options.weight);
            if rule.needs_answer {
                reward.correct.get_or_insert(value >= 1.0);
            }
            let reading = score.reading.map(|reading| Reading { reward: part.name.clone(), ..reading });
            reward.readings.extend(reading);
        }
        Ok(reward)
    }

    /// Answers that the comparing rules read in a completion: the rule's name, and
    /// the answer if it found one.
    pub fn readings<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (&'t str, Option<Cow<'t, str>>)> + 't {
        let rules = self.rules().filter(|(_, rule)| rule.read.is_some());
        rules.map(|(part, rule)| (part.name.as_str(), rule.read(text)))
    }

    /// Inserts the scores of models and programs between the rules', and sums the applicable values: raw ones for
    /// validation, normalized and clipped ones with `statistics`.
    pub fn complete(&self, rewards: &mut [Reward], scores: Vec<Scores>, statistics: Option<&RewardStats>) {
        self.insert(rewards, scores);
        self.sum(rewards, statistics);
    }

    /// Inserts the scores, as the first half of [`Rewards::complete`].
    pub fn insert(&self, rewards: &mut [Reward], mut scores: Vec<Scores>) {
        scores.sort_by_key(|(place, _)| *place);
        for (place, scores) in scores {
            let part = &self.parts[place];
            for (reward, score) in rewards.iter_mut().zip(scores) {
                reward.parts.insert(place, (part.name.clone(), score.value.unwrap_or(f64::NAN)));
                reward.weights.insert(place, part.options.weight);
                let extra = score.extra.into_iter();
                reward.extra.extend(extra.map(|(key, value)| (format!("{}/{key}", part.name), value)));
                reward.repeated |= score.repeated;
                reward.lost = score.lost.or(reward.lost.take());
            }
        }
    }

    /// Sums the applicable values by weight, as the second half of [`Rewards::complete`]; NaN if none applies.
    pub fn sum(&self, rewards: &mut [Reward], statistics: Option<&RewardStats>) {
        for reward in rewards.iter_mut() {
            let values = self.parts.iter().zip(&reward.parts).map(|(part, &(_, value))| {
                part.options.weight * statistics.map_or(value, |statistics| part.shaped(value, statistics))
            });
            let applying = values.filter(|value| !value.is_nan());
            let sum = applying.fold(None, |sum: Option<f64>, value| Some(sum.unwrap_or(0.0) + value));
            reward.total = sum.unwrap_or(f64::NAN);
        }
    }

    /// Names and applicable values of the normalized rewards, after [`Rewards::insert`].
    pub fn normalized(&self, rewards: &[Reward]) -> Vec<(String, Vec<f64>)> {
        let parts = self.parts.iter().enumerate();
        let parts = parts.filter(|(_, part)| part.options.normalize);
        let values = parts.map(|(place, part)| {
            let values = rewards.iter().map(|reward| reward.parts[place].1);
            (part.name.clone(), values.filter(|v| v.is_finite()).collect())
        });
        values.collect()
    }

    /// Returns true if training normalizes or clips any value.
    pub fn shapes(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| part.options.normalize || part.options.clip.is_some())
    }
}

/// A finished completion with a text.
fn finished(text: &str) -> Completion<'_> {
    Completion { text, tokens: &[], finished: true, max_tokens: usize::MAX, in_thought: false }
}

#[cfg(test)]
mod tests;
