//! Judging completions: the task's rules one by one, its reward models all together, and the sum of both.

use crate::data::Prompt;
use crate::reward::{Reading, RewardModel, Surroundings};
use crate::task::{Completion, Reward, Rewards, Task, TaskError};
use crate::{Error, Result};

/// A completion to be scored.
#[derive(Clone, Debug)]
pub struct Answer<'a> {
    /// Its prompt.
    pub prompt: &'a Prompt,
    /// Its text, without special tokens.
    pub text: String,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Whether it ended by itself.
    pub finished: bool,
    /// Which sample it is, for messages.
    pub id: CompletionId,
}

/// Which sample a reward belongs to, for messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct CompletionId {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    pub prompt_index: u64,
    /// Index of the completion in its group.
    pub sample: usize,
}

/// Which of a task's rewards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Those that training maximises.
    Training,
    /// Those that validation reports.
    Validation,
}

/// The reward models of a task, ready to score.
#[derive(Debug, Default)]
pub struct RewardManager {
    models: Vec<RewardModel>,
}

impl RewardManager {
    /// Loads the models that a task's list of rewards names.
    pub fn open(task: &dyn Task, around: Surroundings<'_>) -> Result<Self> {
        let models = task.rewards().into_iter().flat_map(Rewards::models);
        let models = models.map(|(name, config)| RewardModel::open(name, config, around));
        Ok(Self {
            models: models.collect::<Result<_>>()?,
        })
    }

    /// Scores of the models, one list a model. It changes nothing and can be run again after an error.
    pub fn scores(&mut self, answers: &[Answer<'_>]) -> Result<Vec<Vec<f64>>> {
        self.models
            .iter_mut()
            .map(|model| {
                let rows = answers.iter().map(|answer| row(model, answer));
                let scores = model.score(rows.collect::<Result<_>>()?)?;
                match scores.iter().position(|s| !s.is_finite()) {
                    None => Ok(scores),
                    Some(i) => Err(answers[i].failed(format!(
                        "reward `{}` returned {}; rewards must be finite",
                        model.name(),
                        scores[i]
                    ))),
                }
            })
            .collect()
    }
}

fn row(model: &RewardModel, answer: &Answer<'_>) -> Result<Vec<u32>> {
    let prompt = answer.prompt;
    let row = model.read(&Reading {
        prompt: &prompt.example.prompt,
        prompt_text: &prompt.text,
        prompt_tokens: &prompt.tokens,
        completion: &answer.text,
        completion_tokens: answer.tokens,
    })?;
    match model.refuses(row.len()) {
        None => Ok(row),
        Some(reason) => Err(answer.failed(reason)),
    }
}

impl Answer<'_> {
    /// What the task's rules say of it.
    pub fn by_rules(&self, task: &dyn Task, max_tokens: usize, purpose: Purpose) -> Result<Reward> {
        let completion = Completion {
            text: &self.text,
            tokens: self.tokens,
            finished: self.finished,
            max_tokens,
        };
        let example = &self.prompt.example;
        self.checked(match purpose {
            Purpose::Training => task.reward(example, &completion),
            Purpose::Validation => task.validation_reward(example, &completion),
        })
    }

    fn failed(&self, reason: String) -> Error {
        Error::Reward {
            step: self.id.step,
            prompt_index: self.id.prompt_index,
            sample: self.id.sample,
            prompt: self.prompt.text.clone(),
            completion: self.text.clone(),
            reason,
        }
    }

    /// A reward that failed, or that is no number, comes back with its sample.
    fn checked(&self, reward: Result<Reward, TaskError>) -> Result<Reward> {
        match reward {
            Ok(reward) if reward.total.is_finite() => Ok(reward),
            Ok(reward) => Err(self.failed(format!(
                "the reward is {}; rewards must be finite",
                reward.total
            ))),
            Err(e) => Err(self.failed(e.to_string())),
        }
    }
}
