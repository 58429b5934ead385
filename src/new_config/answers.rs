//! Answers for a new configuration, in the user's spelling.

use super::rows::Rows;
use firebrick::backends::DeviceSpec;
use firebrick::engine::hub::{ModelFiles, expand_home, model_folder};
use firebrick::engine::plan::Preset;
use firebrick::engine::plan::size::Budget;
use firebrick::models::{Checkpoint, Tokenizer};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Longest sequence in tokens, if the checkpoint has no lower limit.
const MAX_CONTEXT: usize = 1024;

/// All answers.
#[derive(Clone, Debug, PartialEq)]
pub struct Answers {
    pub model: Model,
    pub data: Data,
    pub reward: Reward,
    pub memory: Memory,
    pub device: DeviceSpec,
}

/// The policy.
#[derive(Clone, Debug, PartialEq)]
pub enum Model {
    /// A small decoder from random weights.
    Tiny,
    /// A checkpoint: a folder, or a name on the Hub.
    Folder {
        path: PathBuf,
        /// Most tokens of a sequence.
        context: usize,
        /// True if it has a chat template.
        chats: bool,
    },
}

/// The prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Generated sums.
    Arithmetic,
    /// Generated puzzles.
    Countdown,
    /// Rows of files.
    Rows(Rows),
}

/// The reward.
#[derive(Clone, Debug, PartialEq)]
pub enum Reward {
    /// Of generated problems: all or nothing, or with partial credit.
    Generated { partial: bool },
    /// A rule without settings.
    Rule(String),
    /// A pattern.
    Regex(String),
    /// A function of a Python file.
    Python { file: PathBuf, function: String },
    /// A reward model's folder.
    Model(PathBuf),
}

/// The memory to use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// A budget for the planner.
    Budget(Budget),
    /// A preset's settings.
    Preset(Preset),
}

impl Model {
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "tiny" {
            return Ok(Self::Tiny);
        }
        let path = expand_home(Path::new(text));
        let error = |e: &dyn Display| format!("model: {e}; give a checkpoint folder, or `tiny`");
        let folder = model_folder(&path, ModelFiles::Tokenizer).map_err(|e| error(&e))?;
        let arch = Checkpoint::architecture(&folder).map_err(|e| error(&e))?;
        let tokenizer = Tokenizer::from_dir(&folder).map_err(|e| error(&e))?;
        Ok(Self::Folder {
            path,
            context: arch.context().unwrap_or(MAX_CONTEXT).min(MAX_CONTEXT),
            chats: tokenizer.has_chat_template(),
        })
    }
}

impl Data {
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "arithmetic" => Ok(Self::Arithmetic),
            "countdown" => Ok(Self::Countdown),
            _ => Rows::inspect(&expand_home(Path::new(text)).to_string_lossy()).map(Self::Rows),
        }
    }

    /// The rewards that go with it, in the user's spelling.
    pub fn rewards(&self) -> &'static str {
        match self {
            Self::Arithmetic | Self::Countdown => "correct, partial",
            Self::Rows(_) => "exact, contains, number, gsm8k, math, regex:PATTERN, python:FILE:FUNCTION, model:FOLDER",
        }
    }

    /// The reward that fits it best.
    pub fn usual_reward(&self) -> &'static str {
        match self {
            Self::Arithmetic | Self::Countdown => "correct",
            Self::Rows(rows) => rows.usual_reward(),
        }
    }
}

/// Rules without settings.
const RULES: [&str; 5] = ["exact", "contains", "number", "gsm8k", "math"];

impl Reward {
    pub fn parse(text: &str, data: &Data) -> Result<Self, String> {
        let Data::Rows(rows) = data else {
            return match text {
                "correct" => Ok(Self::Generated { partial: false }),
                "partial" => Ok(Self::Generated { partial: true }),
                _ => Err(format!("reward: generated problems are graded by `correct` or `partial`, not by `{text}`")),
            };
        };
        if let Some(path) = text.strip_prefix("model:") {
            return Ok(Self::Model(expand_home(Path::new(path))));
        }
        if let Some(pattern) = text.strip_prefix("regex:") {
            return Ok(Self::Regex(pattern.to_owned()));
        }
        if let Some(place) = text.strip_prefix("python:") {
            return python(place);
        }
        if !RULES.contains(&text) {
            return Err(format!("reward: `{text}` is none of {}", data.rewards()));
        }
        rows.check_ground_truth(text)?;
        Ok(Self::Rule(text.to_owned()))
    }
}

/// A function of a file: `FILE:FUNCTION`.
fn python(place: &str) -> Result<Reward, String> {
    let (file, function) = place
        .rsplit_once(':')
        .filter(|(file, function)| !file.is_empty() && !function.is_empty())
        .ok_or_else(|| format!("reward: expected python:FILE:FUNCTION, found `python:{place}`"))?;
    let file = expand_home(Path::new(file));
    if !file.is_file() {
        return Err(format!("reward: there is no file {}", file.display()));
    }
    Ok(Reward::Python { file, function: function.to_owned() })
}

impl Memory {
    pub fn parse(text: &str) -> Result<Self, String> {
        let preset = Preset::ALL.into_iter().find(|preset| preset.name() == text);
        if let Some(preset) = preset {
            return Ok(Self::Preset(preset));
        }
        let budget: Result<Budget, String> = text.parse();
        budget.map(Self::Budget).map_err(|e| {
            let presets = Preset::ALL.map(Preset::name).join(", ");
            format!("memory: {e}, or `auto`, or a preset: {presets}")
        })
    }
}

impl Answers {
    /// Rejects conflicting answers.
    pub fn check(&self) -> Result<(), String> {
        match (&self.model, &self.data) {
            (Model::Tiny, Data::Rows(_)) => Err(
                "model: `tiny` has no tokenizer and reads only generated problems; give a checkpoint folder, or --data \
                 arithmetic"
                    .into(),
            ),
            (Model::Folder { chats: false, path, .. }, Data::Rows(rows)) if rows.is_chat => Err(format!(
                "data: the rows hold conversations, and the model at {} has no chat template; take an instruction-tuned model",
                path.display()
            )),
            _ => Ok(()),
        }
    }
}
