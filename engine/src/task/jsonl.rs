//! Rows of a JSON Lines file as a task.
//!
//! Every row becomes its example when the task is built, so a field that is missing from row 70,000
//! stops the run before its first step.

use std::path::{Path, PathBuf};

use firebrick_models::tokenizer::Message;
use serde::{Deserialize, Serialize};

use super::recipe::Recipe;
use super::rows::{read, split};
use super::template::Row;
use super::{Completion, Example, Reward, RewardConfig, Rewards, Split, Task, TaskError};

/// Settings of a task made of rows.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct JsonlConfig {
    /// Name in metrics: `val-core/<name>/reward`.
    #[serde(default = "default_name")]
    pub name: String,
    /// File of training rows. verl: `data.train_files`.
    pub train: PathBuf,
    /// File of validation rows; without one, they are held out of `train`. verl: `data.val_files`.
    #[serde(default)]
    pub validation: Option<PathBuf>,
    /// Rows in validation: the first of the `validation` file (absent: all of it), or, without that
    /// file, drawn from `train` by `seed` and not trained on (absent: none).
    #[serde(default)]
    pub validation_size: Option<u64>,
    /// The same as a share of `train`, at least one row; only without a `validation` file.
    #[serde(default)]
    pub validation_fraction: Option<f64>,
    /// Seed of which rows are held out.
    #[serde(default)]
    pub seed: u64,
    /// Rows read from `train`, the first of the file; the rest is ignored. verl:
    /// `data.train_max_samples`.
    #[serde(default)]
    pub limit: Option<u64>,
    /// The prompt as a text template, such as `"Question: {question}\nAnswer:"`.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The prompt as chat messages whose contents are templates.
    #[serde(default)]
    pub messages: Option<Vec<Message>>,
    /// The field, as a dotted path, that holds the prompt: a text, or a list of chat messages. This
    /// is the default, with the field `prompt` (TRL's and verl's). verl: `data.prompt_key`.
    #[serde(default)]
    pub prompt_field: Option<String>,
    /// A system message put before a chat prompt.
    #[serde(default)]
    pub system_prompt: Option<String>,
    /// The ground truth as a template.
    #[serde(default)]
    pub answer: Option<String>,
    /// The field that holds the ground truth, as a dotted path. In verl's rows:
    /// `reward_model.ground_truth`.
    #[serde(default)]
    pub answer_field: Option<String>,
    /// How to take the ground truth out of a longer text: `gsm8k` (what follows the last `####`),
    /// or `regex: PATTERN` (group 1 of its last match, or the match if there is no group).
    #[serde(default)]
    pub answer_extract: Option<Extract>,
    /// A demonstration to learn from in supervised training, as a template.
    #[serde(default)]
    pub solution: Option<String>,
    /// The field that holds the demonstration, as a dotted path.
    #[serde(default)]
    pub solution_field: Option<String>,
    /// What completions are judged by; the reward is their weighted sum.
    pub rewards: Vec<RewardConfig>,
}

/// How a ground truth is taken out of a longer text.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Extract {
    /// What follows the last `####`, trimmed, without commas.
    Gsm8k,
    /// Group 1 of the pattern's last match, or the match if the pattern has no group, trimmed.
    Regex(String),
}

fn default_name() -> String {
    "jsonl".to_owned()
}

impl JsonlConfig {
    /// Settings with a file of training rows, their rewards, and defaults for the rest.
    #[must_use]
    pub fn new(train: impl Into<PathBuf>, rewards: Vec<RewardConfig>) -> Self {
        Self {
            name: default_name(),
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
