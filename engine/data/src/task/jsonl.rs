//! Rows of files as a task.
//!
//! Building the task makes every row into its example once, so a field that is missing from row 70,000 stops the
//! run before its first step. The task keeps the rows' positions or their compressed text, and makes an example again when
//! it is drawn.

pub(super) mod config;

pub use config::{Extract, JsonlConfig, MessageTemplate};

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::error::{RowLocation, Unit};
use super::recipe::Recipe;
use super::rows::{Indices, Order, RowFiles, Rows, TRAIN, VALIDATION, split};
use super::template::Row;
use super::{
    Completion, EnvironmentConfig, Environments, Example, PromptText, PythonEnvironments, Reward, RewardConfig,
    Rewards, Split, TOOLS, Task, TaskError,
};

impl JsonlConfig {
    /// Settings with training rows, their rewards, and defaults for the rest.
    pub fn new(train: impl Into<RowFiles>, rewards: Vec<RewardConfig>) -> Self {
        Self { train: train.into(), rewards, ..Self::default() }
    }

    /// Sets the default name in metrics.
    pub(super) fn named(&self, kind: &str) -> Self {
        let mut named = self.clone();
        named.name.get_or_insert_with(|| kind.to_owned());
        named
    }

    /// Number of held-out rows of `rows` training rows.
    fn held_out(&self, rows: u64) -> Result<u64, TaskError> {
        let (setting, held_out) = match (self.validation_size, self.validation_fraction) {
            (None, None) => return Ok(0),
            (Some(_), Some(_)) => {
                let detail = "expected at most one of `validation_size` and `validation_fraction`, \
                              found both";
                return Err(TaskError::config("task.validation_fraction", detail));
            }
            (Some(size), None) => ("task.validation_size", size),
            (None, Some(share)) => {
                let least = u64::from(share > 0.0);
                ("task.validation_fraction", ((rows as f64 * share).round() as u64).max(least))
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

    /// The weights of the training sources, if they have any.
    fn weights(&self) -> Result<Option<Vec<f64>>, TaskError> {
        let weights = self.train.weights(TRAIN)?;
        if weights.is_some() && self.limit.is_some() {
            let detail =
                "takes the first rows of all sources together, so it cannot go with weights; remove one of them";
            return Err(TaskError::config("task.limit", detail));
        }
        Ok(weights)
    }

    /// The used rows of `validation`.
    fn validation_rows(&self, rows: &Rows) -> Result<Indices, TaskError> {
        let mut used = Indices::Range(0..rows.len());
        if let Some(size) = self.validation_size {
            let len = rows.len();
            if size > len {
                let detail = format!("expected at most the {len} rows of the `validation` files, found {size}");
                return Err(TaskError::config("task.validation_size", detail));
            }
            used.truncate(size);
        }
        Ok(used)
    }

    /// The files of each source of `validation`, if there are any.
    fn validation_files(&self, base: &Path) -> Result<Option<Vec<Vec<PathBuf>>>, TaskError> {
        let Some(files) = &self.validation else {
            return Ok(None);
        };
        if self.validation_fraction.is_some() {
            let detail = "is a fraction of `train`, but there are `validation` files; remove one of them, or set \
             `validation_size`";
            return Err(TaskError::config("task.validation_fraction", detail));
        }
        if files.weights(VALIDATION)?.is_some() {
            let detail = "every validation row is used once, so it takes no weights; remove them";
            return Err(TaskError::config(VALIDATION, detail));
        }
        Ok(Some(files.list(base, VALIDATION)?))
    }

    /// The rows of each named set of `validation`, with these files by source, in a task of this name.
    fn sets(&self, task: &str, rows: &Rows, sources: &[Vec<PathBuf>]) -> Result<Vec<(String, Range<u64>)>, TaskError> {
        let mut sets = Vec::new();
        let named = self.validation.iter().flat_map(|files| &files.0);
        for (source, range) in named.zip(rows.of_sources(sources)) {
            let Some(name) = &source.set else { continue };
            if name == task {
                let detail = format!(
                    "validation set `{name}` has the same name as the task, which is reserved for the aggregate; \
                     rename one"
                );
                return Err(TaskError::config(VALIDATION, detail));
            }
            sets.push((name.clone(), range));
        }
        Ok(sets)
    }
}

/// Default name of a task.
const NAME: &str = "jsonl";

/// A task made of rows.
#[derive(Debug)]
pub struct Jsonl {
    name: String,
    recipe: Recipe,
    rewards: Rewards,
    environments: Option<PythonEnvironments>,
    train: Rows,
    train_order: Order,
    /// Without `train`, the row of every prompt of the environment.
    endless: Option<Row>,
    /// If absent, rows of `train` are held out.
    validation: Option<Rows>,
    validation_order: Order,
    /// The rows of each named set of `validation`.
    sets: Vec<(String, Range<u64>)>,
}

impl Jsonl {
    /// Reads the files, resolved against `base`, and checks every row.
    ///
    /// # Errors
    /// `TaskError` with the setting, the file and the row: missing, empty or damaged files, missing
    /// fields, ground truths that a reward cannot read, conflicting settings.
    pub fn new(config: &JsonlConfig, base: &Path) -> Result<Self, TaskError> {
        TaskError::check("task", config)?;
        let environments =
            config.environment.as_ref().map(|EnvironmentConfig::Python(python)| PythonEnvironments::open(python));
        let environments = environments.transpose()?;
        let rewards = match &environments {
            // the environment gives the reward
            Some(environments) if config.rewards.is_empty() && environments.has_reward() => Rewards::default(),
            _ => Rewards::new(&config.rewards)?,
        };
        let recipe = Recipe::new(config)?;
        let check = |row: Row| {
            let place = row.place.clone();
            let example = check_row(row, &recipe, &rewards)?;
            match environments {
                Some(_) => check_environment_row(&example, &place),
                None => Ok(()),
            }
        };
        let endless = config.train.is_empty().then(|| empty_row(config)).transpose()?;
        endless.clone().map_or(Ok(()), &check)?;
        let weights = config.weights()?;
        let sources = config.train.list(base, TRAIN)?;
        let validation_files = config.validation_files(base)?;
        let train = Rows::read(&sources.concat(), TRAIN, config.limit, &check)?;
        let held_out = match &validation_files {
            Some(_) => 0,
            None => config.held_out(train.len())?,
        };
        let (kept, held_out) = split(train.len(), held_out, config.seed);
        let validation =
            validation_files.as_ref().map(|files| Rows::read(&files.concat(), VALIDATION, None, &check)).transpose()?;
        let held_out = match &validation {
            Some(rows) => config.validation_rows(rows)?,
            None => held_out,
        };
        let name = config.name.clone().unwrap_or_else(|| NAME.to_owned());
        let sets = match (&validation, &validation_files) {
            (Some(rows), Some(files)) => config.sets(&name, rows, files)?,
            _ => Vec::new(),
        };
        Ok(Self {
            name,
            sets,
            endless,
            train_order: order(&train, kept, &sources, weights)?,
            train,
            validation,
            validation_order: Order::plain(held_out),
            recipe,
            rewards,
            environments,
        })
    }

    fn endless(&self, split: Split) -> Option<&Row> {
        self.endless.as_ref().filter(|_| split == Split::Train)
    }

    fn order(&self, split: Split) -> (&Rows, &Order) {
        match split {
            Split::Train => (&self.train, &self.train_order),
            Split::Validation => (self.validation.as_ref().unwrap_or(&self.train), &self.validation_order),
        }
    }
}

/// The row of a task without rows: an empty message of the user, as in TRL, which the environment extends.
pub(super) fn empty_row(config: &JsonlConfig) -> Result<Row, TaskError> {
    if config.environment.is_none() {
        let detail = "expected rows: a file, a folder or a Hub dataset; only a task with `environment` can omit it";
        return Err(TaskError::config(TRAIN, detail));
    }
    let prompt = serde_json::json!([{"role": "user", "content": ""}]);
    Ok(Row {
        place: RowLocation { path: "the empty prompt of a task without `train`".into(), line: 1, unit: Unit::Row },
        fields: [("prompt".to_owned(), prompt)].into_iter().collect(),
    })
}

/// Makes a row's example and checks that every reward can read its answer.
pub(super) fn check_row(row: Row, recipe: &Recipe, rewards: &Rewards) -> Result<Example, TaskError> {
    let place = row.place.clone();
    if let (Some(reward), false) = (rewards.needs_answer(), recipe.has_answer(&row)) {
        let detail = format!(
            "reward `{reward}` compares with a ground truth, but the task has none: neither `answer_field` nor `answer` is set, \
             and the row has no `reward_model.ground_truth`; its fields are {}",
            row.names()
        );
        return Err(row.bad("task.answer_field", detail));
    }
    let example = recipe.example(row)?;
    let answer = rewards.check_answer(&example.answer);
    answer.map_err(|error| TaskError::bad_field(&place, "task.rewards", error.to_string()))?;
    Ok(example)
}

/// Rejects a row that a task with an environment does not support.
fn check_environment_row(example: &Example, place: &RowLocation) -> Result<(), TaskError> {
    let bad = |setting, detail: &str| TaskError::bad_field(place, setting, detail);
    match &example.prompt {
        PromptText::Text(_) => Err(bad(
            "task.environment",
            "the prompt is plain text; expected a conversation (`messages`), in which an environment can answer",
        )),
        PromptText::Chat(messages) if !messages.iter().any(|m| m.role() == "user") => Err(bad(
            "task.environment",
            "the conversation has no user message, to which an environment could add its first text",
        )),
        PromptText::Chat(_) if example.fields.get(TOOLS).is_some_and(|tools| !tools.is_null()) => {
            Err(bad(TOOLS, "the row has tools, and so has the environment; remove the column"))
        }
        PromptText::Chat(_) => Ok(()),
    }
}

/// The order of training rows: by weight if there are weights.
fn order(rows: &Rows, kept: Indices, sources: &[Vec<PathBuf>], weights: Option<Vec<f64>>) -> Result<Order, TaskError> {
    let Some(weights) = weights else {
        return Ok(Order::plain(kept));
    };
    let mut parts = Vec::new();
    for (at, (range, weight)) in rows.of_sources(sources).zip(weights).enumerate() {
        let part = kept.within(&range);
        if part.len() == 0 {
            let detail = "all of its rows are held out for validation; lower `validation_size`";
            return Err(TaskError::config(format!("{TRAIN}.{at}"), detail));
        }
        parts.push((part, weight));
    }
    Ok(Order::weighted(parts))
}

impl Task for Jsonl {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.endless(split).is_none().then(|| self.order(split).1.len())
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        let (rows, order) = self.order(split);
        let row = match self.endless(split) {
            Some(row) => row.clone(),
            None => {
                let none = || TaskError::no_such_example(&self.name, split, index, order.len());
                rows.get(order.row(index).ok_or_else(none)?)?
            }
        };
        let mut example = self.recipe.example(row)?;
        if let Some(environments) = &self.environments {
            example.fields.insert(TOOLS.to_owned(), environments.tools().clone());
        }
        Ok(example)
    }

    fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let train = self.train.paths().map(|path| (TRAIN, path));
        let validation = self.validation.iter().flat_map(Rows::paths).map(|path| (VALIDATION, path));
        train.chain(validation).map(|(key, path)| (key, path.to_owned())).collect()
    }

    fn held_bytes(&self) -> u64 {
        let rows = std::iter::once(&self.train).chain(&self.validation);
        let orders = [&self.train_order, &self.validation_order];
        let bytes = rows.map(Rows::held_bytes).sum::<usize>();
        bytes as u64 + orders.iter().map(|order| order.held_bytes()).sum::<u64>()
    }

    fn validation_set(&self, index: u64) -> Option<&str> {
        let row = self.validation_order.row(index)?;
        let set = self.sets.iter().find(|(_, rows)| rows.contains(&row));
        set.map(|(name, _)| name.as_str())
    }

    fn environments(&self) -> Option<&dyn Environments> {
        self.environments.as_ref().map(|environments| environments as _)
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
