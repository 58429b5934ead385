//! Checks of a run before it starts: its file, the models and rows that the file names, and its
//! memory.

use crate::planned::{self, Spread};
use firebrick::backends::device;
use firebrick::engine::config::{CheckedFile, Problem, RunConfig};
use firebrick::engine::hub::{ModelFiles, model_folder, stay_offline};
use firebrick::engine::reward;
use firebrick::engine::task::{RewardKind, RowFiles, TaskConfig, TaskError, TaskProblem};
use firebrick::engine::{self, Error};
use firebrick::models::Arch;
use firebrick::models::{Checkpoint, Tokenizer};
use std::path::Path;

/// Result of a check.
#[derive(Debug)]
pub struct Checked {
    /// Mistakes, in the order of the file's lines.
    pub problems: Vec<Problem>,
    /// Parts that could not be checked: the key and the reason.
    pub left_out: Vec<String>,
}

/// Checks a file with overrides and all that it names. Configs and tokenizers of Hub models and rows of Hub
/// datasets are downloaded, unless `offline`.
pub fn check(path: &Path, overrides: &[String], offline: bool) -> anyhow::Result<Checked> {
    if offline {
        stay_offline();
    }
    let mut file = CheckedFile::read(path, overrides)?;
    let (config, rest) = (file.config.take(), file.rest.take());
    let mut checker = Checker {
        problems: std::mem::take(&mut file.problems),
        left_out: Vec::new(),
        file,
        offline,
        invalid: Vec::new(),
    };
    if let Some(named) = config.as_ref().or(rest.as_ref()) {
        checker.models(named);
        checker.rows(named);
    }
    if let Some(config) = config {
        checker.plan(config);
    }
    checker.problems.sort_by_key(|problem| problem.place);
    Ok(Checked { problems: checker.problems, left_out: checker.left_out })
}

struct Checker {
    file: CheckedFile,
    problems: Vec<Problem>,
    left_out: Vec<String>,
    offline: bool,
    /// Keys with invalid values.
    invalid: Vec<String>,
}

impl Checker {
    /// Adds the error of a key's value, unless it is only due to offline mode.
    fn note(&mut self, key: &str, error: &Error) {
        if self.is_unchecked(key, error) {
            return;
        }
        self.invalid.push(key.to_owned());
        let message = message(error);
        if self.is_reported(&message) {
            return;
        }
        let names_key = matches!(error, Error::Task(task) if task.setting().is_some()) || message.contains(key);
        let message = if names_key { message } else { format!("{key}: {message}") };
        self.problems.push(self.file.problem_of(key, &message));
    }

    fn is_unchecked(&mut self, key: &str, error: &Error) -> bool {
        let (Error::Hub(hub) | Error::Task(TaskError::Hub { error: hub, .. })) = error else {
            return false;
        };
        if self.offline {
            let what = format!("{key}: {}, being offline", hub.name);
            if !self.left_out.contains(&what) {
                self.left_out.push(what);
            }
        }
        self.offline
    }

    /// Returns true if a problem has this message, or contains it or is contained in it.
    fn is_reported(&self, message: &str) -> bool {
        let is_same = |problem: &Problem| problem.message.contains(message) || message.contains(&problem.message);
        self.problems.iter().any(is_same)
    }

    /// The models: their configs, their tokenizers, the adapters' shape.
    fn models(&mut self, config: &RunConfig) {
        let model = &config.model;
        let arch = (model.path.as_ref()).and_then(|path| self.model("model.path", path));
        for (key, folder) in [("model.path", &model.path), ("model.tokenizer", &model.tokenizer)] {
            let known = key != "model.path" || arch.is_some();
            if let Some(folder) = folder.as_ref().filter(|_| known) {
                self.take(key, tokenizer(folder));
            }
        }
        if let (Some(lora), Some(arch)) = (&model.lora, &arch) {
            let key = if lora.path.is_some() { "model.lora.path" } else { "model.lora" };
            self.take(key, lora.shape(arch));
        }
        self.take("model.chat_template", model.template());
        if let Some(path) = config.critic.as_ref().and_then(|critic| critic.model.path.as_ref()) {
            self.model("critic.model.path", path);
        }
        let rewards = config.task.as_ref().and_then(|task| task.rows());
        for (at, config) in rewards.iter().flat_map(|rows| rows.rewards.iter().enumerate()) {
            if let RewardKind::Model(model) = &config.kind {
                self.take(&format!("task.rewards.{at}.path"), reward::architecture(config.name(), model));
            }
        }
    }

    /// A model's architecture by its config.
    fn model(&mut self, key: &str, path: &Path) -> Option<Arch> {
        let folder = model_folder(path, ModelFiles::Config).map_err(Error::from);
        let arch = folder.and_then(|folder| Ok(Checkpoint::architecture(&folder)?));
        self.take(key, arch)
    }

    fn take<T>(&mut self, key: &str, read: engine::Result<T>) -> Option<T> {
        read.map_err(|error| self.note(key, &error)).ok()
    }

    /// The rows of training and validation, their fields, and the rewards.
    fn rows(&mut self, config: &RunConfig) {
        let base = Path::new(".");
        if let Some(task) = &config.task {
            let found = if self.file.is_incomplete("task") { task.missing_files(base) } else { task.problems(base) };
            for TaskProblem { key, error } in found {
                self.note(&key, &Error::Task(error));
            }
        }
        let (sft, warmup) = (config.sft.as_ref(), config.warmup.sft.as_ref());
        for (key, files) in [
            ("sft.train", sft.and_then(|sft| sft.train.as_ref())),
            ("sft.validation", sft.and_then(|sft| sft.validation.as_ref())),
            ("warmup.sft.train", warmup.and_then(|sft| sft.train.as_ref())),
        ] {
            let files = files.map(|path| RowFiles::from(path.as_path()));
            for error in files.iter().flat_map(|files| files.missing(base, key)) {
                self.note(key, &Error::Task(error));
            }
        }
    }

    /// Removes invalid rewards before planning: if no plan fits without them, none fits with them.
    fn remove_invalid_rewards(&self, config: &mut RunConfig) {
        let Some(TaskConfig::Dataset(rows) | TaskConfig::Jsonl(rows)) = &mut config.task else {
            return;
        };
        let is_invalid = |at: usize| {
            let key = format!("task.rewards.{at}");
            let mut below = self.invalid.iter().filter_map(|invalid| invalid.strip_prefix(&key));
            below.any(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let mut at = 0;
        rows.rewards.retain(|_| {
            at += 1;
            !is_invalid(at - 1)
        });
        // an empty list is a separate mistake, and a rule takes no memory
        if rows.rewards.is_empty() && at > 0 {
            let rule = RewardKind::Exact { ignore_case: false };
            rows.rewards.push(rule.into());
        }
    }

    /// Checks that need a plan: memory, lengths, combinations of device and model.
    fn plan(&mut self, mut config: RunConfig) {
        // a share of the memory of a GPU of another machine; the CPU is always available
        let share = config.rollout.gpu_memory_utilization;
        let is_here = device::open(config.device).is_ok();
        if share.is_some() && !is_here {
            config.rollout.gpu_memory_utilization = None;
            self.left_out.push(format!(
                "rollout.gpu_memory_utilization: {} is not available, and its memory is unknown",
                config.device
            ));
        }
        self.remove_invalid_rewards(&mut config);
        let memory = &config.memory;
        let degrees = [
            memory.ulysses_sequence_parallel_size,
            memory.tensor_model_parallel_size,
            memory.pipeline_model_parallel_size,
        ];
        let spread = Spread::from_groups(degrees, config.critic_sequences());
        let task = config.task.clone();
        let error = match planned::plan(config, spread) {
            Ok(planned) => planned.unread.map(anyhow::Error::from),
            Err(error) => {
                // a failed plan has not read all rows
                let built = task.map(|task| task.build(Path::new(".")));
                if let Some(Err(error)) = built {
                    let key = error.setting().unwrap_or("task").to_owned();
                    self.note(&key, &Error::Task(error));
                }
                Some(error)
            }
        };
        let Some(error) = error else { return };
        let known = error.downcast_ref::<Error>();
        if known.is_some_and(|error| self.is_unchecked("the plan", error)) {
            return;
        }
        let message = known.map_or_else(|| format!("{error:#}"), message);
        let message = message.trim_start_matches("config: ").to_owned();
        if !self.is_reported(&message) {
            let mut problem = self.file.problem(&message);
            if message.contains("no plan fits") {
                problem = self.file.problem_of("memory.budget", &message);
            }
            self.problems.push(problem);
        }
    }
}

fn tokenizer(folder: &Path) -> engine::Result<Tokenizer> {
    Ok(Tokenizer::from_dir(&model_folder(folder, ModelFiles::Tokenizer)?)?)
}

/// An error's message, without the prefix of configuration and task errors.
fn message(error: &Error) -> String {
    match error {
        Error::Config(detail) => detail.clone(),
        Error::Task(error) => error.to_string(),
        other => other.to_string(),
    }
}
