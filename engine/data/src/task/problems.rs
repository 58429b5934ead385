//! Everything that is wrong with a task and what it names, at once: building it stops at the first.

use std::path::Path;

use super::jsonl::{checked, row_of_none};
use super::recipe::Recipe;
use super::rows::{TRAIN, VALIDATION};
use super::template::Row;
use super::{EnvironmentConfig, JsonlConfig, PythonEnvironments, Rewards, RowFiles, TaskConfig, TaskError};

/// A mistake in a task.
#[derive(Debug)]
pub struct TaskProblem {
    /// The key that it is about, as a dotted path with numbers for entries of lists: `task.rewards.0.pattern`.
    pub key: String,
    /// What was expected, what was found, what to do.
    pub error: TaskError,
}

impl TaskProblem {
    fn new(error: TaskError) -> Self {
        let setting = error.setting().unwrap_or("task");
        let key = setting.replace('[', ".").replace(']', "");
        let is_own = key == "task" || key.starts_with("task.");
        Self { key: if is_own { key } else { "task".to_owned() }, error }
    }
}

impl TaskConfig {
    /// What is wrong with the task's settings, the files that they name and the first row of each split;
    /// [`build`](Self::build) looks at the other rows. Relative paths are resolved against `base`; what is of the Hub
    /// is fetched.
    #[must_use]
    pub fn problems(&self, base: &Path) -> Vec<TaskProblem> {
        match self.rows() {
            Some(rows) => problems(rows, base),
            None => self.build(base).err().map(TaskProblem::new).into_iter().collect(),
        }
    }

    /// The files that cannot be had or opened, whatever the other settings say.
    #[must_use]
    pub fn missing_files(&self, base: &Path) -> Vec<TaskProblem> {
        let Some(rows) = self.rows() else {
            return Vec::new();
        };
        let missing = sources(rows).flat_map(|(setting, files)| files.missing(base, setting));
        missing.map(TaskProblem::new).collect()
    }
}

/// The settings of a task that name rows.
fn sources(config: &JsonlConfig) -> impl Iterator<Item = (&'static str, &RowFiles)> {
    let validation = config.validation.as_ref().map(|own| (VALIDATION, own));
    std::iter::once((TRAIN, &config.train)).chain(validation)
}

fn problems(config: &JsonlConfig, base: &Path) -> Vec<TaskProblem> {
    let mut found = Vec::new();
    if let Some(EnvironmentConfig::Python(own)) = &config.environment {
        let opened = PythonEnvironments::open(own);
        found.extend(opened.err().map(TaskProblem::new));
    }
    // an environment may reward by itself
    let judged = config.environment.is_none() || !config.rewards.is_empty();
    let of_rewards = if judged { of_rewards(config) } else { Vec::new() };
    let rewards = (judged && of_rewards.is_empty()).then(|| Rewards::new(&config.rewards).ok()).flatten();
    found.extend(of_rewards);
    let recipe = match Recipe::checked(config) {
        Ok(recipe) => Some(recipe),
        Err(errors) => {
            found.extend(errors.into_iter().map(TaskProblem::new));
            None
        }
    };
    if config.train.is_empty() {
        match row_of_none(config) {
            Ok(row) => {
                let faults = recipe.iter().flat_map(|own| faults(&row, own, rewards.as_ref()));
                found.extend(faults.map(TaskProblem::new));
            }
            Err(error) => found.push(TaskProblem::new(error)),
        }
    }
    let mut told: Vec<String> = Vec::new();
    for (setting, files) in sources(config) {
        let missing = files.missing(base, setting);
        if !missing.is_empty() {
            found.extend(missing.into_iter().map(TaskProblem::new));
            continue;
        }
        let row = match files.first(base, setting) {
            Ok(Some(row)) => row,
            Ok(None) => continue,
            Err(error) => {
                let mut problem = TaskProblem::new(error);
                if problem.key == "task" {
                    setting.clone_into(&mut problem.key);
                }
                found.push(problem);
                continue;
            }
        };
        let faults = recipe.as_ref().map(|recipe| faults(&row, recipe, rewards.as_ref()));
        for fault in faults.unwrap_or_default() {
            // the same field is missing from both splits by one mistake
            let about = format!("{:?} {}", fault.setting(), field(&fault));
            if !told.contains(&about) {
                told.push(about);
                found.push(TaskProblem::new(fault));
            }
        }
    }
    found
}

/// All that is wrong with a row.
fn faults(row: &Row, recipe: &Recipe, rewards: Option<&Rewards>) -> Vec<TaskError> {
    let faults = recipe.faults(row);
    match rewards {
        Some(rewards) if faults.is_empty() => {
            let example = checked(row.clone(), recipe, rewards);
            example.err().into_iter().collect()
        }
        _ => faults,
    }
}

/// The field that a fault is about, where it is about one.
fn field(fault: &TaskError) -> &str {
    match fault {
        TaskError::MissingField { field, .. } => field,
        _ => "",
    }
}

/// What is wrong with the list of rewards.
fn of_rewards(config: &JsonlConfig) -> Vec<TaskProblem> {
    let problem = |(at, error): (Option<usize>, TaskError)| {
        let Some(at) = at else {
            let key = "task.rewards".to_owned();
            return TaskProblem { key, error };
        };
        // settings name a reward by its name: `rewards.NAME.pattern`
        let name = format!("rewards.{}", config.rewards[at].name());
        let below = error.setting().and_then(|own| own.strip_prefix(&name));
        let key = format!("task.rewards.{at}{}", below.unwrap_or_default());
        TaskProblem { key, error }
    };
    Rewards::problems(&config.rewards).into_iter().map(problem).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(yaml: &str, folder: &Path) -> Vec<(String, String)> {
        let config: TaskConfig = serde_saphyr::from_str(yaml).expect("a task");
        let found = config.problems(folder);
        found.into_iter().map(|own| (own.key, own.error.to_string())).collect()
    }

    #[test]
    fn files_fields_and_rewards_are_looked_at_each_by_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let rows = "{\"question\": \"1+1\", \"answer\": \"2\"}\n";
        std::fs::write(folder.path().join("rows.jsonl"), rows).expect("a file");
        let found = task(
            "kind: dataset\ntrain: rows.jsonl\nvalidation: held_out.jsonl\n\
             messages: [{role: system, content: \"{sytem}\"}, {role: user, content: \"{questoin} {nr}\"}]\n\
             answer_field: anser\nrewards: [{kind: exact}, {kind: regex, pattern: \"(\"}, {kind: length, buffer: 1, max: 2}]\n",
            folder.path(),
        );
        let keys: Vec<&str> = found.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(
            keys,
            [
                "task.rewards.1.pattern",
                "task.rewards.2",
                "task.messages.0.content",
                "task.messages.1.content",
                "task.messages.1.content",
                "task.answer_field",
                "task.validation",
            ],
            "{found:#?}"
        );
        for (at, part) in [(2, "`sytem`"), (3, "`questoin`"), (4, "`nr`"), (5, "`anser`")] {
            assert!(found[at].1.contains(part), "{found:#?}");
        }
    }

    #[test]
    fn a_field_that_is_missing_from_both_splits_is_one_mistake() {
        let folder = tempfile::tempdir().expect("a folder");
        let rows = "{\"q\": \"1+1\", \"answer\": \"2\"}\n";
        std::fs::write(folder.path().join("rows.jsonl"), rows).expect("a file");
        let yaml = |field: &str| {
            format!(
                "kind: dataset\ntrain: rows.jsonl\nvalidation: rows.jsonl\nprompt: \"{{{field}}}\"\n\
                 answer_field: answer\nrewards: [{{kind: exact}}]\n"
            )
        };
        let found = task(&yaml("question"), folder.path());
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].0, "task.prompt");
        assert!(task(&yaml("q"), folder.path()).is_empty());
    }
}
