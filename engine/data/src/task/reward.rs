//! What a completion is worth: rules on its text, its length and the ground truth, reward models, and their weighted
//! sum.

mod choice;
mod config;
mod countdown;
mod format;
mod length;
mod math;
mod pattern;
mod program;
mod repetition;
mod rule;
mod running;
mod schema;
mod verdict;
mod verl;

use std::borrow::Cow;

pub use self::config::{
    Gsm8kMethod, RepetitionUnit, RewardConfig, RewardInput, RewardKind, RewardModelConfig, RewardOptions,
};
pub(crate) use self::countdown::{CountdownProblem, Reached, find as countdown_answer};
pub(crate) use self::pattern::compile;
pub use self::program::{CommandRewardConfig, PythonRewardConfig, RewardProgram};
use self::rule::Rule;
pub use self::running::{RunningStats, Shaping};
use super::error::TaskError;
use super::{Completion, Reading, Reward};

impl RewardConfig {
    fn judge(&self) -> Result<Grader, TaskError> {
        let setting = format!("rewards.{}", self.name());
        if let RewardKind::Model(model) = &self.kind {
            if model.score_tokens == Some(0) {
                let detail = "expected at least 1 token, found 0";
                return Err(TaskError::config(format!("{setting}.score_tokens"), detail));
            }
            return Ok(Grader::Model(model.clone()));
        }
        let program = match &self.kind {
            RewardKind::Python(config) => Some(RewardProgram::Python(config.clone())),
            RewardKind::Command(config) => Some(RewardProgram::Command(config.clone())),
            _ => None,
        };
        if let Some(program) = program {
            program.check(|key| format!("{setting}.{key}"))?;
            return Ok(Grader::Program(program));
        }
        Ok(Grader::Rule(Rule::new(&self.kind, &setting)?))
    }

    /// The program's file or folder, where it is not there.
    fn missing_file(&self) -> Option<TaskError> {
        let (key, path) = match &self.kind {
            RewardKind::Python(own) => ("file", Some(&own.file)),
            RewardKind::Command(own) => ("folder", own.folder.as_ref()),
            _ => return None,
        };
        let path = path.filter(|path| !path.exists())?;
        let setting = format!("rewards.{}.{key}", self.name());
        let detail = format!("there is no {key} {}", path.display());
        Some(TaskError::config(setting, detail))
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
                let detail = format!("expected two finite values in ascending order, found [{low}, {high}]");
                Err(TaskError::config(setting("clip"), detail))
            }
            _ => Ok(()),
        }
    }
}

/// Rewards ready to judge: patterns compiled, settings checked.
#[derive(Clone, Debug, Default)]
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
    Program(RewardProgram),
}

/// A reward that judges many completions at a time.
#[derive(Clone, Copy, Debug)]
pub enum BatchedReward<'a> {
    /// A reward model.
    Model(&'a RewardModelConfig),
    /// Another program.
    Program(&'a RewardProgram),
}

impl Part {
    fn rule(&self) -> Option<&Rule> {
        match &self.judge {
            Grader::Rule(rule) => Some(rule),
            Grader::Model(_) | Grader::Program(_) => None,
        }
    }

    fn judge(&self) -> Option<BatchedReward<'_>> {
        match &self.judge {
            Grader::Rule(_) => None,
            Grader::Model(model) => Some(BatchedReward::Model(model)),
            Grader::Program(program) => Some(BatchedReward::Program(program)),
        }
    }
}

impl Rewards {
    /// Checks and compiles a list of rewards. The list must not be empty, nor name two rewards
    /// alike.
    ///
    /// # Errors
    /// `TaskError::Config` for an empty list, two rewards of one name, and settings that cannot be.
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
            parts.push(Part { options: config.options.clone(), judge: config.judge()?, name });
        }
        Ok(Self { parts })
    }

    /// What is wrong with the entries of a list, each with its number; and what is wrong with the list, where no entry
    /// is.
    pub(crate) fn problems(configs: &[RewardConfig]) -> Vec<(Option<usize>, TaskError)> {
        let mut found = Vec::new();
        for (at, config) in configs.iter().enumerate() {
            let errors = [config.check().err(), config.judge().err()];
            let missing = config.missing_file();
            let errors = errors.into_iter().chain([missing]).flatten();
            found.extend(errors.map(|error| (Some(at), error)));
        }
        if found.is_empty() {
            found.extend(Self::new(configs).err().map(|error| (None, error)));
        }
        found
    }

    /// The first reward that compares with a ground truth, if any does.
    #[must_use]
    pub fn needs_answer(&self) -> Option<&str> {
        self.parts.iter().find(|part| part.rule().is_some_and(Rule::needs_answer)).map(|part| part.name.as_str())
    }

    /// Name and settings of every reward model, in the order of the list.
    pub fn models(&self) -> impl Iterator<Item = (&str, &RewardModelConfig)> {
        self.judges().filter_map(|(name, judge)| match judge {
            BatchedReward::Model(model) => Some((name, model)),
            BatchedReward::Program(_) => None,
        })
    }

    /// Name and settings of every reward that is no rule, in the order of the list: reward models and other programs.
    pub fn judges(&self) -> impl Iterator<Item = (&str, BatchedReward<'_>)> {
        let parts = self.parts.iter();
        parts.filter_map(|part| Some((part.name.as_str(), part.judge()?)))
    }

    /// Whether a ground truth is one that every reward can compare with, so that a broken row is
    /// found when it is loaded and not after hours of training.
    ///
    /// A rule that compares with the ground truth has to give it 1 itself, said in the form that the rule reads.
    pub(crate) fn check_answer(&self, answer: &str) -> Result<(), TaskError> {
        self.score(answer, &saying(""))?;
        for part in &self.parts {
            let Some((rule, own)) = part.rule().and_then(|r| Some((r, r.own_gold(answer)?))) else {
                continue;
            };
            let failed = |reason| TaskError::Reward { reward: part.name.clone(), reason };
            let value = rule.judge(answer, &saying(&own)).map_err(failed)?.value;
            if value < 1.0 {
                let read = rule.reading(&own);
                return Err(failed(format!(
                    "it scores its ground truth {value} instead of 1 (answer {answer:?}, completion {own:?}, parsed as \
                     {}); set `answer_extract`, or use another rule",
                    read.map_or_else(|| "nothing".into(), |read| format!("{read:?}"))
                )));
            }
        }
        Ok(())
    }

    /// Judges a completion by the rules of the list; what its models and programs say comes later, for many completions
    /// at a time ([`Rewards::complete`]). An error means that the sample cannot be judged (its ground truth is not what
    /// a reward compares with), never that the completion is wrong.
    ///
    /// # Errors
    /// `TaskError::Reward` with the reward's name and the reason.
    pub fn score(&self, answer: &str, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let mut reward = Reward::default();
        for part in &self.parts {
            let Some(rule) = part.rule() else { continue };
            let verdict = rule
                .judge(answer, completion)
                .map_err(|reason| TaskError::Reward { reward: part.name.clone(), reason })?;
            reward.add(&part.name, verdict.value, part.options.weight);
            if rule.needs_answer() {
                reward.correct.get_or_insert(verdict.value >= 1.0);
            }
            if verdict.parsed.is_some() || verdict.gold.is_some() {
                reward.readings.push(Reading {
                    reward: part.name.clone(),
                    parsed: verdict.parsed,
                    gold: verdict.gold,
                    undecided: verdict.undecided,
                });
            }
        }
        Ok(reward)
    }

    /// What each rule that compares one piece of the text with the ground truth reads in a completion: its name, and
    /// the piece if it found one.
    pub fn readings<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (&'t str, Option<Cow<'t, str>>)> + 't {
        let rules = self.parts.iter();
        rules.filter_map(|part| {
            let rule = part.rule().filter(|rule| rule.reads())?;
            Some((part.name.as_str(), rule.reading(text)))
        })
    }

    /// Puts the judges' scores (one list a judge, in the order of [`Rewards::judges`], one number a completion, NaN
    /// where a reward does not apply) between the rules', and makes the sums of what applies.
    pub fn complete(&self, rewards: &mut [Reward], judges: &[Vec<f64>], shaping: Shaping<'_>) {
        self.insert(rewards, judges);
        self.sum(rewards, shaping);
    }

    /// The first half of [`Rewards::complete`]: every reward has its part.
    pub fn insert(&self, rewards: &mut [Reward], judges: &[Vec<f64>]) {
        let mut judges = judges.iter();
        for (place, part) in self.parts.iter().enumerate() {
            if part.judge().is_none() {
                continue;
            }
            let Some(scores) = judges.next() else { unreachable!("one list of scores per reward model or program") };
            for (reward, &score) in rewards.iter_mut().zip(scores) {
                reward.parts.insert(place, (part.name.clone(), score));
                reward.weights.insert(place, part.options.weight);
            }
        }
    }

    /// The second half: sums of what applies, weighted; NaN where nothing does.
    pub fn sum(&self, rewards: &mut [Reward], shaping: Shaping<'_>) {
        for reward in rewards.iter_mut() {
            let values = self.parts.iter().zip(&reward.parts);
            let values =
                values.map(|(part, (_, value))| part.options.weight * shaping.of(&part.name, &part.options, *value));
            let applying = values.filter(|value| !value.is_nan());
            let sum = applying.fold(None, |sum: Option<f64>, value| Some(sum.unwrap_or(0.0) + value));
            reward.total = sum.unwrap_or(f64::NAN);
        }
    }

    /// What the rewards that training normalises have given, after [`Rewards::insert`]: their names, and their values
    /// where they apply.
    #[must_use]
    pub fn normalized(&self, rewards: &[Reward]) -> Vec<(String, Vec<f64>)> {
        let parts = self.parts.iter().enumerate();
        let parts = parts.filter(|(_, part)| part.options.normalize);
        let values = parts.map(|(place, part)| {
            let values = rewards.iter().map(|reward| reward.parts[place].1);
            (part.name.clone(), values.filter(|v| !v.is_nan()).collect())
        });
        values.collect()
    }

    /// Whether training changes any value before it is weighted.
    #[must_use]
    pub fn shapes(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| part.options.normalize || part.options.clip.is_some())
    }
}

/// A finished completion that says a text.
fn saying(text: &str) -> Completion<'_> {
    Completion { text, tokens: &[], finished: true, max_tokens: usize::MAX, in_thought: false }
}

#[cfg(test)]
mod tests;
