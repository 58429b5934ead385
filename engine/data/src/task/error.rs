//! What can go wrong between a task's configuration and a completion's reward.

use std::fmt::Display;
use std::path::PathBuf;

use super::Split;
use crate::hub::HubError;

/// Errors of tasks and rewards. A message includes its cause, which [`source`](std::error::Error::source) therefore
/// does not give again.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// A dataset file could not be read.
    #[error(
        "cannot read the dataset {} (setting `{setting}`): {error}; \
         relative paths in a configuration file are relative to its folder",
        path.display()
    )]
    Read {
        /// The setting that names the file.
        setting: &'static str,
        /// The file, resolved.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A dataset of the Hub could not be had.
    #[error("{error} (setting `{setting}`)")]
    Hub {
        /// The setting that names it.
        setting: &'static str,
        /// Which one, why, and what to do.
        error: HubError,
    },
    /// A dataset file ends too early or is damaged.
    #[error(
        "{}: cannot be read after row {rows}: {detail}; the file is incomplete, damaged, or not in the format that its \
         name indicates. Download or write it again",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Rows that were read before.
        rows: usize,
        /// What the reader said.
        detail: String,
    },
    /// A dataset file has a format, or something inside of it, that is not read.
    #[error("{}: {detail}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it has, and what to do.
        detail: String,
    },
    /// A row is not there any more as it was checked.
    #[error("{place}: the file was changed after the run had checked it ({detail}); start the run again")]
    Changed {
        /// File and row.
        place: RowLocation,
        /// What was found.
        detail: String,
    },
    /// A dataset file has no rows.
    #[error("the dataset {} (setting `{setting}`) has no rows; expected at least one", path.display())]
    Empty {
        /// The setting that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// A line is not a JSON object.
    #[error("{place}: expected one JSON object per {}, found {found}", place.unit.name())]
    NotARow {
        /// File and line.
        place: RowLocation,
        /// What was found.
        found: String,
    },
    /// A row lacks a field that the configuration names.
    #[error("{place}: the row has no field `{field}` (set by `{setting}`); its fields are {found}")]
    MissingField {
        /// File and line.
        place: RowLocation,
        /// The field that was looked for, as a dotted path.
        field: String,
        /// The setting that names the field.
        setting: String,
        /// The fields that the row has.
        found: String,
    },
    /// A row has the field, but its value cannot be used.
    #[error("{place}: {detail} (setting `{setting}`)")]
    BadField {
        /// File and line.
        place: RowLocation,
        /// The setting that reads the field.
        setting: String,
        /// What was expected and what was found.
        detail: String,
    },
    /// A prompt template does not parse.
    #[error(
        "the template {template:?} of `{setting}` {detail}; \
         write a field as `{{name}}`, and a literal brace as `{{{{` or `}}}}`"
    )]
    Template {
        /// The setting.
        setting: String,
        /// The template.
        template: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A regular expression does not compile.
    #[error("the regular expression {pattern:?} of `{setting}` is invalid: {detail}")]
    Regex {
        /// The setting.
        setting: String,
        /// The pattern.
        pattern: String,
        /// What the regex compiler said.
        detail: String,
    },
    /// A setting has a value that makes no sense, alone or beside another.
    #[error("`{setting}`: {detail}")]
    Config {
        /// The setting.
        setting: String,
        /// What was expected, what was found, what to do.
        detail: String,
    },
    /// A reward cannot judge a sample: not a wrong completion, but a broken ground truth or
    /// setting.
    #[error("reward `{reward}` failed on this sample: {reason}")]
    Reward {
        /// The reward's name.
        reward: String,
        /// Why, and what to do.
        reason: String,
    },
    /// An example was asked for beyond the end of its split.
    #[error("task `{task}` has {len} {split} examples; there is no example {index} (from 0)")]
    NoSuchExample {
        /// The task's name.
        task: String,
        /// The split's name.
        split: &'static str,
        /// The index asked for.
        index: u64,
        /// How many there are.
        len: u64,
    },
}

impl TaskError {
    /// The setting that it is about, where it is about one.
    #[must_use]
    pub fn setting(&self) -> Option<&str> {
        match self {
            Self::Read { setting, .. } | Self::Hub { setting, .. } | Self::Empty { setting, .. } => Some(setting),
            Self::MissingField { setting, .. }
            | Self::BadField { setting, .. }
            | Self::Template { setting, .. }
            | Self::Regex { setting, .. }
            | Self::Config { setting, .. } => Some(setting),
            Self::Damaged { .. }
            | Self::Unsupported { .. }
            | Self::Changed { .. }
            | Self::NotARow { .. }
            | Self::Reward { .. }
            | Self::NoSuchExample { .. } => None,
        }
    }

    /// A [`TaskError::NoSuchExample`].
    #[must_use]
    pub fn no_such_example(task: &str, split: Split, index: u64, len: u64) -> Self {
        Self::NoSuchExample { task: task.to_owned(), split: split.name(), index, len }
    }

    /// Refuses a setting that is not `least` to `most`; `unit` follows these in the message.
    pub(crate) fn check_range<T: Copy + PartialOrd + Display>(
        setting: &str,
        value: T,
        [least, most]: [T; 2],
        unit: &str,
    ) -> Result<(), Self> {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(Self::config(setting, format!("expected {least} to {most}{unit}, found {value}")))
    }

    /// A [`TaskError::BadField`].
    pub(crate) fn bad_field(place: &RowLocation, setting: &str, detail: impl Into<String>) -> Self {
        Self::BadField { place: place.clone(), setting: setting.to_owned(), detail: detail.into() }
    }

    /// A [`TaskError::Config`].
    pub(crate) fn config(setting: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::Config { setting: setting.into(), detail: detail.into() }
    }
}

/// A row of a dataset file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowLocation {
    /// The file.
    pub path: PathBuf,
    /// The line or row, from 1.
    pub line: usize,
    /// Which of the two is counted.
    pub unit: Unit,
}

/// What the rows of a file are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Lines of a text, blank ones included.
    Line,
    /// Rows of a file that has no lines, or not one for each.
    Row,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Row => "row",
        }
    }
}

impl Display for RowLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (path, unit) = (self.path.display(), self.unit.name());
        write!(f, "{path}, {unit} {}", self.line)
    }
}
