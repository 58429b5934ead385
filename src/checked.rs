//! Everything that is wrong with a run before it starts: its file, the models and rows that the file names, and its
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

/// What was found.
#[derive(Debug)]
pub struct Checked {
    /// What is wrong, in the order of the file's lines.
    pub problems: Vec<Problem>,
    /// What could not be looked at here: the key, and why.
    pub left_out: Vec<String>,
}

/// Looks at a file with overrides and at all that it names. Of a model of the Hub its config and its tokenizer are
/// fetched, of a dataset its rows; nothing where it is `offline`.
pub fn check(path: &Path, overrides: &[String], offline: bool) -> anyhow::Result<Checked> {
    if offline {
        stay_offline();
    }
    let mut file = CheckedFile::read(path, overrides)?;
    let (config, rest) = (file.config.take(), file.rest.take());
    let mut look =
        Look { problems: std::mem::take(&mut file.problems), left_out: Vec::new(), file, offline, wrong: Vec::new() };
    if let Some(named) = config.as_ref().or(rest.as_ref()) {
        look.models(named);
        look.rows(named);
    }
    if let Some(config) = config {
        look.plan(config);
    }
    look.problems.sort_by_key(|problem| problem.place);
    Ok(Checked { problems: look.problems, left_out: look.left_out })
}

struct Look {
    file: CheckedFile,
    problems: Vec<Problem>,
    left_out: Vec<String>,
    offline: bool,
    /// Keys whose values are wrong.
    wrong: Vec<String>,
}

impl Look {
    /// Takes in what is wrong with a key's value, unless it is only that the network is not to be used.
    fn note(&mut self, key: &str, error: &Error) {
        if self.leaves_out(key, error) {
            return;
        }
        self.wrong.push(key.to_owned());
        let message = message(error);
        if self.is_told(&message) {
            return;
        }
        let names_it = matches!(error, Error::Task(own) if own.setting().is_some());
        let said = if names_it || message.contains(key) { message } else { format!("{key}: {message}") };
        self.problems.push(self.file.problem_of(key, &said));
    }

    fn leaves_out(&mut self, key: &str, error: &Error) -> bool {
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

    /// Whether something says this already, alone or among more words.
    fn is_told(&self, message: &str) -> bool {
        let told = |own: &Problem| own.message.contains(message) || message.contains(&own.message);
        self.problems.iter().any(told)
    }

    /// The models: their configs, their tokenizers, the adapters' shape.
    fn models(&mut self, config: &RunConfig) {
        let model = &config.model;
        let arch = (model.path.as_ref()).and_then(|path| self.model("model.path", path));
        for (key, folder) in [("model.path", &model.path), ("model.tokenizer", &model.tokenizer)] {
            let known = key != "model.path" || arch.is_some();
            if let Some(folder) = folder.as_ref().filter(|_| known) {
                let read = tokenizer(folder);
                self.take(key, read);
            }
        }
        if let (Some(lora), Some(arch)) = (&model.lora, &arch) {
            let key = if lora.path.is_some() { "model.lora.path" } else { "model.lora" };
            self.take(key, lora.shape(arch));
        }
        self.take("model.chat_template", model.template());
        let critic = config.critic.as_ref().and_then(|own| own.model.path.as_ref());
        if let Some(path) = critic {
            self.model("critic.model.path", path);
        }
        let rewards = config.task.as_ref().and_then(|task| task.rows());
        for (at, own) in rewards.iter().flat_map(|rows| rows.rewards.iter().enumerate()) {
            if let RewardKind::Model(model) = &own.kind {
                let read = reward::architecture(own.name(), model);
                self.take(&format!("task.rewards.{at}.path"), read);
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

    /// The rows that are trained and validated on, their fields, and what judges.
    fn rows(&mut self, config: &RunConfig) {
        let base = Path::new(".");
        if let Some(task) = &config.task {
            let found = if self.file.lacks_parts_of("task") { task.missing_files(base) } else { task.problems(base) };
            for TaskProblem { key, error } in found {
                self.note(&key, &Error::Task(error));
            }
        }
        let (sft, warmup) = (config.sft.as_ref(), config.warmup.sft.as_ref());
        for (key, files) in [
            ("sft.train", sft.and_then(|own| own.train.as_ref())),
            ("sft.validation", sft.and_then(|own| own.validation.as_ref())),
            ("warmup.sft.train", warmup.and_then(|own| own.train.as_ref())),
        ] {
            let files = files.map(|path| RowFiles::from(path.as_path()));
            for error in files.iter().flat_map(|own| own.missing(base, key)) {
                self.note(key, &Error::Task(error));
            }
        }
    }

    /// Takes the rewards that are wrong out of what is planned: what nothing fits without them, nothing fits with them.
    fn leave_wrong_rewards(&self, config: &mut RunConfig) {
        let Some(TaskConfig::Dataset(rows) | TaskConfig::Jsonl(rows)) = &mut config.task else {
            return;
        };
        let is_wrong = |at: usize| {
            let key = format!("task.rewards.{at}");
            let below =
                |own: &String| own.strip_prefix(&key).map(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()));
            self.wrong.iter().any(|own| below(own).unwrap_or(false))
        };
        let mut at = 0;
        rows.rewards.retain(|_| {
            at += 1;
            !is_wrong(at - 1)
        });
        // a list without any is a mistake of its own, and a rule takes no memory
        if rows.rewards.is_empty() && at > 0 {
            let rule = RewardKind::Exact { ignore_case: false };
            rows.rewards.push(rule.into());
        }
    }

    /// What only a plan finds: memory, lengths, what the device and the model do not do together.
    fn plan(&mut self, mut config: RunConfig) {
        // a share of the memory of a card that is elsewhere; the CPU is always here
        let share = config.rollout.gpu_memory_utilization;
        let is_here = device::open(config.device).is_ok();
        if share.is_some() && !is_here {
            config.rollout.gpu_memory_utilization = None;
            self.left_out.push(format!(
                "rollout.gpu_memory_utilization: {} is not available, and its memory is unknown",
                config.device
            ));
        }
        self.leave_wrong_rewards(&mut config);
        let memory = &config.memory;
        let degrees = [
            memory.ulysses_sequence_parallel_size,
            memory.tensor_model_parallel_size,
            memory.pipeline_model_parallel_size,
        ];
        let spread = Spread::of_groups(degrees, config.critic_sequences());
        let task = config.task.clone();
        let error = match planned::plan(config, spread) {
            Ok(planned) => planned.unread.map(anyhow::Error::from),
            Err(error) => {
                // a plan that is none has not looked at all rows
                let built = task.map(|task| task.build(Path::new(".")));
                if let Some(Err(error)) = built {
                    let key = error.setting().unwrap_or("task").to_owned();
                    self.note(&key, &Error::Task(error));
                }
                Some(error)
            }
        };
        let Some(error) = error else { return };
        let own = error.downcast_ref::<Error>();
        if own.is_some_and(|own| self.leaves_out("the plan", own)) {
            return;
        }
        let message = own.map_or_else(|| format!("{error:#}"), message);
        let message = message.trim_start_matches("config: ").to_owned();
        if !self.is_told(&message) {
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

/// An error's message, without the words that say it is one of the configuration or the task.
fn message(error: &Error) -> String {
    match error {
        Error::Config(detail) => detail.clone(),
        Error::Task(error) => error.to_string(),
        other => other.to_string(),
    }
}
