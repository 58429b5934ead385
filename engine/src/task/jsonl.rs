//! Rows of a JSON Lines file as a task.
//!
//! Every row becomes its example when the task is built, so a field that is missing from row 70,000
//! stops the run before its first step.

mod config;

pub use config::{Extract, JsonlConfig};

use std::path::{Path, PathBuf};

use super::recipe::Recipe;
use super::rows::{read, split};
use super::template::Row;
use super::{Completion, Example, Reward, RewardConfig, Rewards, Split, Task, TaskError};

impl JsonlConfig {
    /// Settings with a file of training rows, their rewards, and defaults for the rest.
    #[must_use]
    pub fn new(train: impl Into<PathBuf>, rewards: Vec<RewardConfig>) -> Self {
        Self {
            name: config::default_name(),
            train: train.into(),
            validation: None,
            validation_size: None,
            validation_fraction: None,
            seed: 0,
            limit: None,
            prompt: None,
            messages: None,
            prompt_field: None,
            system_prompt: None,
            answer: None,
            answer_field: None,
            answer_extract: None,
            solution: None,
            solution_field: None,
            rewards,
        }
    }

    /// How many of `rows` training rows are held out.
    fn held_out(&self, rows: u64) -> Result<u64, TaskError> {
        let (setting, held_out) = match (self.validation_size, self.validation_fraction) {
            (None, None) => return Ok(0),
            (Some(_), Some(_)) => {
                let detail = "expected at most one of `validation_size` and `validation_fraction`, \
                              found both";
                return Err(TaskError::config("task.validation_fraction", detail));
            }
            (Some(size), None) => ("task.validation_size", size),
            (None, Some(share)) if (0.0..1.0).contains(&share) => {
                let least = u64::from(share > 0.0);
                (
                    "task.validation_fraction",
                    ((rows as f64 * share).round() as u64).max(least),
                )
            }
            (None, Some(share)) => {
                let detail =
                    format!("expected a share from 0 up to, not including, 1, found {share}");
                return Err(TaskError::config("task.validation_fraction", detail));
            }
        };
        if held_out >= rows {
            let detail = format!(
                "holding out {held_out} of {rows} rows leaves none to train on; lower it, or set a `validation` file"
            );
            return Err(TaskError::config(setting, detail));
        }
        Ok(held_out)
    }

    fn rows(&self, base: &Path) -> Result<(Vec<Row>, Vec<Row>), TaskError> {
        if self.limit == Some(0) {
            let detail = "expected at least 1 row, found 0; remove it to read all rows";
            return Err(TaskError::config("task.limit", detail));
        }
        let train = read(&base.join(&self.train), "task.train", self.limit)?;
        let Some(file) = &self.validation else {
            let held_out = self.held_out(train.len() as u64)?;
            return Ok(split(train, held_out, self.seed));
        };
        if self.validation_fraction.is_some() {
            let detail = "is a fraction of `train`, but there is a `validation` file; remove one of them, or set \
             `validation_size`";
            return Err(TaskError::config("task.validation_fraction", detail));
        }
        let mut validation = read(&base.join(file), "task.validation", None)?;
        if let Some(size) = self.validation_size {
            let found = validation.len() as u64;
            if size > found {
                let detail = format!(
                    "expected at most the {found} rows of the `validation` file, found {size}"
                );
                return Err(TaskError::config("task.validation_size", detail));
            }
            validation.truncate(size as usize);
        }
        Ok((train, validation))
    }
}

/// The task of a JSON Lines file.
#[derive(Debug)]
pub struct Jsonl {
    name: String,
    train: Vec<Example>,
    validation: Vec<Example>,
    rewards: Rewards,
}

impl Jsonl {
    /// Reads the files, resolved against `base`, and makes an example of every row.
    pub fn new(config: &JsonlConfig, base: &Path) -> Result<Self, TaskError> {
        let rewards = Rewards::new(&config.rewards)?;
        let recipe = Recipe::new(config)?;
        if let (Some(reward), None) = (rewards.needs_answer(), recipe.answer()) {
            let detail = format!(
                "reward `{reward}` compares with a ground truth, but the task has none; set `answer_field` or `answer`"
            );
            return Err(TaskError::config("task.answer_field", detail));
        }
        let (train, validation) = config.rows(base)?;
        let example = |row: Row| {
            let place = row.place.clone();
            let example = recipe.example(row)?;
            rewards
                .check_answer(&example.answer)
                .map_err(|error| TaskError::BadField {
                    place,
                    setting: "task.rewards".to_owned(),
                    detail: error.to_string(),
                })?;
            Ok(example)
        };
        let train = train.into_iter().map(example).collect::<Result<_, _>>()?;
        let validation = validation
            .into_iter()
            .map(example)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: config.name.clone(),
            train,
            validation,
            rewards,
        })
    }

    fn examples(&self, split: Split) -> &[Example] {
        match split {
            Split::Train => &self.train,
            Split::Validation => &self.validation,
        }
    }
}

impl Task for Jsonl {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self, split: Split) -> Option<u64> {
        Some(self.examples(split).len() as u64)
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        let examples = self.examples(split);
        usize::try_from(index)
            .ok()
            .and_then(|at| examples.get(at))
            .cloned()
            .ok_or_else(|| TaskError::NoSuchExample {
                task: self.name.clone(),
                split: split.name(),
                index,
                len: examples.len() as u64,
            })
    }

    fn rewards(&self) -> Option<&Rewards> {
        Some(&self.rewards)
    }

    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        self.rewards.score(&example.answer, completion)
    }
}

#[cfg(test)]
mod tests;
