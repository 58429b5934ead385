//! Errors of tasks and rewards.

use std::fmt::Display;
use std::path::PathBuf;

use firebrick_settings::violations_of;
use schemars::JsonSchema;
use serde::Serialize;

use super::Split;
use crate::hub::HubError;

/// Errors of tasks and rewards. The message includes the cause; [`source`](std::error::Error::source) is therefore
/// empty.
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
        /// The system's error.
        error: std::io::Error,
    },
    /// A dataset of the Hub is unavailable.
    #[error("{error} (setting `{setting}`)")]
    Hub {
        /// The setting that names it.
        setting: &'static str,
        /// The dataset, the reason and the remedy.
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
        /// The reader's error.
        detail: String,
    },
    /// A dataset file has a format, or a part, that is not supported.
    #[error("{}: {detail}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The unsupported part and the remedy.
        detail: String,
    },
    /// A row has changed since it was checked.
    #[error("{place}: the file was changed after the run had checked it ({detail}); start the run again")]
    Changed {
        /// File and row.
        place: RowLocation,
        /// The finding.
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
        /// The finding.
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
        /// Expectation and finding.
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
        /// The mistake.
        detail: String,
    },
    /// A regular expression does not compile.
    #[error("the regular expression {pattern:?} of `{setting}` is invalid: {detail}")]
    Regex {
        /// The setting.
        setting: String,
        /// The pattern.
        pattern: String,
        /// The regex compiler's error.
        detail: String,
    },
    /// A setting has an invalid value, alone or together with another.
    #[error("`{setting}`: {detail}")]
    Config {
        /// The setting.
        setting: String,
        /// Expectation, finding, remedy.
        detail: String,
    },
    /// A reward cannot judge a sample: not a wrong completion, but a broken ground truth or
    /// setting.
    #[error("reward `{reward}` failed on this sample: {reason}")]
    Reward {
        /// The reward's name.
        reward: String,
        /// The reason and the remedy.
        reason: String,
    },
    /// The index of an example exceeds its split.
    #[error("task `{task}` has {len} {split} examples; there is no example {index} (from 0)")]
    NoSuchExample {
        /// The task's name.
        task: String,
        /// The split's name.
        split: &'static str,
        /// The requested index.
        index: u64,
        /// The number of examples.
        len: u64,
    },
}

impl TaskError {
    /// The setting of the error, if it has one.
    pub fn setting(&self) -> Option<&str> {
        match self {
            Self::Read { setting, .. } | Self::Hub { setting, .. } | Self::Empty { setting, .. } => Some(setting),
            Self::MissingField { setting, .. }
            | Self::BadField { setting, .. }
            | Self::Template { setting, .. }
            | Self::Regex { setting, .. }
            | Self::Config { setting, .. } => Some(setting),
            _ => None,
        }
    }

    /// A [`TaskError::NoSuchExample`].
    pub fn no_such_example(task: &str, split: Split, index: u64, len: u64) -> Self {
        Self::NoSuchExample { task: task.to_owned(), split: split.name(), index, len }
    }

    /// Rejects settings that violate their schema: the first of their keys that does, below `section`.
    pub(crate) fn check(section: &str, settings: &(impl JsonSchema + Serialize)) -> Result<(), Self> {
        violations_of(settings).first().map_or(Ok(()), |violation| {
            let (key, detail) = violation.parts();
            Err(Self::config(format!("{section}.{key}"), detail))
        })
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
    /// The unit of `line`.
    pub unit: Unit,
}

/// Unit of the numbers of a file's rows.
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
