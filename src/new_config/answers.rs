//! What a new configuration is made of, as a user spells it.

use firebrick::backends::DeviceSpec;
use firebrick::engine::plan::Preset;
use firebrick::engine::plan::size::Budget;
use firebrick::models::{Checkpoint, Tokenizer};
use serde_json::Value;
use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Fields of rows that hold a question, the likeliest first.
const QUESTIONS: [&str; 6] = [
    "prompt",
    "question",
    "problem",
    "messages",
    "instruction",
    "input",
];
/// Fields of rows that hold the ground truth, the likeliest first.
const GROUND_TRUTHS: [&str; 6] = [
    "answer",
    "ground_truth",
    "solution",
    "target",
    "output",
    "response",
];
/// Tokens of a sequence where a checkpoint does not limit them.
const CONTEXT: usize = 1024;

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
    /// A checkpoint folder.
    Folder {
        path: PathBuf,
        /// Most tokens of a sequence.
        context: usize,
        /// Whether it has a chat template.
        chats: bool,
    },
}

/// The prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Generated sums.
    Arithmetic,
    /// Rows of a JSON Lines file.
    Rows {
        path: PathBuf,
        /// The field with the question.
        question: String,
        /// Whether that field holds a conversation.
        is_chat: bool,
        /// The field with the ground truth.
        answer: Option<String>,
        /// Whether ground truths end as GSM8K's do, after `####`.
        is_marked: bool,
    },
}

/// What judges.
#[derive(Clone, Debug, PartialEq)]
pub enum Reward {
    /// Of generated sums: all or nothing, or the share of right characters.
    Sums { partial: bool },
    /// A rule that needs no more than its name.
    Rule(String),
    /// A pattern.
    Regex(String),
    /// A reward model's folder.
    Model(PathBuf),
}

/// How much memory there is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Memory {
    /// A budget that a plan is made within.
    Budget(Budget),
    /// A preset's settings.
    Preset(Preset),
}

impl Model {
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "tiny" {
            return Ok(Self::Tiny);
        }
        let path = PathBuf::from(text);
        let of = |e: &dyn Display| format!("model: {e}; give a checkpoint folder, or `tiny`");
        let arch = Checkpoint::architecture(&path).map_err(|e| of(&e))?;
        let tokenizer = Tokenizer::from_dir(&path).map_err(|e| of(&e))?;
        Ok(Self::Folder {
            path,
            context: arch.context().unwrap_or(CONTEXT).min(CONTEXT),
            chats: tokenizer.has_chat_template(),
        })
    }
}

impl Data {
    pub fn parse(text: &str) -> Result<Self, String> {
        if text == "arithmetic" {
            return Ok(Self::Arithmetic);
        }
        let row = first_row(Path::new(text))?;
        let has = |field: &&&str| row.get(**field).is_some_and(|value| !value.is_null());
        let fields = || {
            let names = row.as_object().map(|row| row.keys().cloned().collect());
            let names: Vec<String> = names.unwrap_or_default();
            names.join(", ")
        };
        let Some(question) = QUESTIONS.iter().find(has) else {
            return Err(format!(
                "data: the first row of {text} has the fields {}, and none of {}; rename the field with the question",
                fields(),
                QUESTIONS.join(", ")
            ));
        };
        let mut answer = GROUND_TRUTHS.iter().find(has).map(|&own| own.to_owned());
        let mut truth = answer.as_ref().map(|field| &row[field]);
        // verl's rows
        if answer.is_none()
            && let Some(own) = row.pointer("/reward_model/ground_truth")
        {
            answer = Some("reward_model.ground_truth".into());
            truth = Some(own);
        }
        Ok(Self::Rows {
            path: text.into(),
            question: (*question).to_owned(),
            is_chat: row[question].is_array(),
            answer,
            is_marked: truth
                .and_then(Value::as_str)
                .is_some_and(|own| own.contains("####")),
        })
    }

    /// The rewards that go with it, as they are spelled.
    pub fn rewards(&self) -> &'static str {
        match self {
            Self::Arithmetic => "correct, partial",
            Self::Rows { .. } => "exact, contains, number, gsm8k, regex:PATTERN, model:FOLDER",
        }
    }
}

/// The first row of a JSON Lines file.
fn first_row(path: &Path) -> Result<Value, String> {
    let of = |e: &dyn Display| {
        let path = path.display();
        format!("data: {path}: {e}; give a JSON Lines file, or `arithmetic`")
    };
    let file = std::fs::File::open(path).map_err(|e| of(&e))?;
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|e| of(&e))?;
        if line.trim().is_empty() {
            continue;
        }
        let row: Value = serde_json::from_str(&line).map_err(|e| of(&e))?;
        if row.is_object() {
            return Ok(row);
        }
        return Err(of(&"the first line is no JSON object"));
    }
    Err(of(&"it has no rows"))
}

impl Reward {
    pub fn parse(text: &str, data: &Data) -> Result<Self, String> {
        let answer = match data {
            Data::Arithmetic => {
                return match text {
                    "correct" => Ok(Self::Sums { partial: false }),
                    "partial" => Ok(Self::Sums { partial: true }),
                    _ => Err(format!(
                        "reward: arithmetic is judged by `correct` or `partial`, not by `{text}`"
                    )),
                };
            }
            Data::Rows { answer, .. } => answer,
        };
        if let Some(path) = text.strip_prefix("model:") {
            return Ok(Self::Model(path.into()));
        }
        if let Some(pattern) = text.strip_prefix("regex:") {
            return Ok(Self::Regex(pattern.to_owned()));
        }
        if !["exact", "contains", "number", "gsm8k"].contains(&text) {
            return Err(format!("reward: `{text}` is none of {}", data.rewards()));
        }
        if answer.is_none() {
            return Err(format!(
                "reward: `{text}` compares with a ground truth, and the first row has none of the fields {}; rename the field with \
                 the answer",
                GROUND_TRUTHS.join(", ")
            ));
        }
        Ok(Self::Rule(text.to_owned()))
    }
}

impl Memory {
    pub fn parse(text: &str) -> Result<Self, String> {
        let preset = Preset::ALL.into_iter().find(|own| own.name() == text);
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
    /// Refuses answers that do not go together.
    pub fn check(&self) -> Result<(), String> {
        match (&self.model, &self.data) {
            (Model::Tiny, Data::Rows { .. }) => Err(
                "model: `tiny` has no tokenizer and reads generated sums alone; give a checkpoint folder, or --data arithmetic".into(),
            ),
            (Model::Folder { chats: false, path, .. }, Data::Rows { is_chat: true, .. }) => Err(format!(
                "data: the rows hold conversations, and the model at {} has no chat template; take an instruction-tuned model",
                path.display()
            )),
            _ => Ok(()),
        }
    }
}
