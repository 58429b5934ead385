//! All mistakes of a task and its files, whereas building it stops at the first.

use std::path::Path;

use super::jsonl::{check_row, empty_row};
use super::recipe::Recipe;
use super::rows::{TRAIN, VALIDATION};
use super::template::Row;
use super::{EnvironmentConfig, JsonlConfig, PythonEnvironments, Rewards, RowFiles, TaskConfig, TaskError};

/// A mistake in a task.
#[derive(Debug)]
pub struct TaskProblem {
    /// Its key, as a dotted path with numbers for entries of lists: `task.rewards.0.pattern`.
    pub key: String,
    /// Expectation, finding, remedy.
    pub error: TaskError,
}

impl TaskProblem {
    fn new(error: TaskError) -> Self {
        let setting = error.setting().unwrap_or("task");
        let key = setting.replace('[', ".").replace(']', "");
        let is_task_key = key == "task" || key.starts_with("task.");
        Self { key: if is_task_key { key } else { "task".to_owned() }, error }
    }
}

impl TaskConfig {
    /// Mistakes of the task's settings, files and the first row of each split;
    /// [`build`](Self::build) looks at the other rows. Relative paths are resolved against `base`; files of the Hub
    /// are downloaded.
    pub fn problems(&self, base: &Path) -> Vec<TaskProblem> {
        match self.rows() {
            Some(rows) => problems(rows, base),
            None => self.build(base).err().map(TaskProblem::new).into_iter().collect(),
        }
    }

    /// The files that are unavailable or cannot be opened, despite other mistakes.
    pub fn missing_files(&self, base: &Path) -> Vec<TaskProblem> {
        let Some(rows) = self.rows() else {
            return Vec::new();
        };
        let missing = sources(rows).flat_map(|(setting, files)| files.missing(base, setting));
        missing.map(TaskProblem::new).collect()
    }
}

/// Settings with sources of rows, and the sources.
fn sources(config: &JsonlConfig) -> impl Iterator<Item = (&'static str, &RowFiles)> {
    let validation = config.validation.as_ref().map(|files| (VALIDATION, files));
    std::iter::once((TRAIN, &config.train)).chain(validation)
}

fn problems(config: &JsonlConfig, base: &Path) -> Vec<TaskProblem> {
    let mut problems = Vec::new();
    if let Some(EnvironmentConfig::Python(python)) = &config.environment {
        problems.extend(PythonEnvironments::open(python).err().map(TaskProblem::new));
    }
    // an environment may give the reward alone
    let has_rewards = config.environment.is_none() || !config.rewards.is_empty();
    let reward_problems = if has_rewards { reward_problems(config) } else { Vec::new() };
    let rewards = (has_rewards && reward_problems.is_empty()).then(|| Rewards::new(&config.rewards).ok()).flatten();
    problems.extend(reward_problems);
    let recipe = match Recipe::checked(config) {
        Ok(recipe) => Some(recipe),
        Err(errors) => {
            problems.extend(errors.into_iter().map(TaskProblem::new));
            None
        }
    };
    if config.train.is_empty() {
        match empty_row(config) {
            Ok(row) => {
                let faults = recipe.iter().flat_map(|recipe| faults(&row, recipe, rewards.as_ref()));
                problems.extend(faults.map(TaskProblem::new));
            }
            Err(error) => problems.push(TaskProblem::new(error)),
        }
    }
    let mut files_seen: Vec<String> = Vec::new();
    for (setting, files) in sources(config) {
        let missing = files.missing(base, setting);
        if !missing.is_empty() {
            problems.extend(missing.into_iter().map(TaskProblem::new));
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
                problems.push(problem);
                continue;
            }
        };
        let faults = recipe.as_ref().map(|recipe| faults(&row, recipe, rewards.as_ref()));
        for fault in faults.unwrap_or_default() {
            // the same field is missing from both splits by one mistake
            let fault_key = format!("{:?} {}", fault.setting(), field(&fault));
            if !files_seen.contains(&fault_key) {
                files_seen.push(fault_key);
                problems.push(TaskProblem::new(fault));
            }
        }
    }
    problems
}

/// All mistakes of a row.
fn faults(row: &Row, recipe: &Recipe, rewards: Option<&Rewards>) -> Vec<TaskError> {
    let faults = recipe.faults(row);
    match rewards {
        Some(rewards) if faults.is_empty() => {
            let example = check_row(row.clone(), recipe, rewards);
            example.err().into_iter().collect()
        }
        _ => faults,
    }
}

/// The missing field of a fault, if it has one.
fn field(fault: &TaskError) -> &str {
    match fault {
        TaskError::MissingField { field, .. } => field,
        _ => "",
    }
}

/// Mistakes of the list of rewards.
fn reward_problems(config: &JsonlConfig) -> Vec<TaskProblem> {
    let problem = |(at, error): (Option<usize>, TaskError)| {
        let Some(at) = at else {
            let key = "task.rewards".to_owned();
            return TaskProblem { key, error };
        };
        // settings name a reward by its name: `rewards.NAME.pattern`
        let name = format!("rewards.{}", config.rewards[at].name());
        let below = error.setting().and_then(|setting| setting.strip_prefix(&name));
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
        let problems = config.problems(folder);
        problems.into_iter().map(|own| (own.key, own.error.to_string())).collect()
    }

    #[test]
    fn files_fields_and_rewards_are_looked_at_each_by_itself() {
        let folder = tempfile::tempdir().expect("a folder");
        let rows = "{\"question\": \"1+1\", \"answer\": \"2\"}\n";
        std::fs::write(folder.path().join("rows.jsonl"), rows).expect("a file");
        let problems = task(
            "kind: dataset\ntrain: rows.jsonl\nvalidation: held_out.jsonl\n\
             messages: [{role: system, content: \"{sytem}\"}, {role: user, content: \"{questoin} {nr}\"}]\n\
             answer_field: anser\nrewards: [{kind: exact}, {kind: regex, pattern: \"(\"}, {kind: length, buffer: 1, max: 2}]\n",
            folder.path(),
        );
        let keys: Vec<&str> = problems.iter().map(|(key, _)| key.as_str()).collect();
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
            "{problems:#?}"
        );
        for (at, part) in [(2, "`sytem`"), (3, "`questoin`"), (4, "`nr`"), (5, "`anser`")] {
            assert!(problems[at].1.contains(part), "{problems:#?}");
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
        let problems = task(&yaml("question"), folder.path());
        assert_eq!(problems.len(), 1, "{problems:#?}");
        assert_eq!(problems[0].0, "task.prompt");
        assert!(task(&yaml("q"), folder.path()).is_empty());
    }
}
