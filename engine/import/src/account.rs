//! Report of an import: the outcome of every key.

use super::assembly::Missing;
use super::engine::Engine;
use super::entry::SourceLocation;
use serde::Serialize;
use serde_json::Value;

/// A configuration of another engine converted to Firebrick's, with a report of every key.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Imported {
    /// Engine of the files.
    pub engine: Engine,
    /// The configuration, as YAML.
    pub config: String,
    /// Every key of the files, in their order.
    pub rows: Vec<ImportedKey>,
    /// Defaults of the engine that the files leave out and that set something here.
    pub assumed: Vec<ImportedKey>,
    /// Values that a run needs and the files lack: the configuration holds placeholders for them.
    pub missing: Vec<Missing>,
    /// Settings that were changed to go with others, and why.
    pub adjusted: Vec<String>,
    /// Parts of the files that were skipped, with their places.
    pub notes: Vec<String>,
    /// Reason why the configuration is rejected, if it is.
    pub problem: Option<String>,
}

impl Imported {
    /// Keys of the files that results may depend on and that the configuration does not have, in their order.
    pub fn gaps(&self) -> impl Iterator<Item = &ImportedKey> {
        let is_gap = |row: &&ImportedKey| matches!(row.outcome, KeyOutcome::Cannot { .. } | KeyOutcome::Unknown { .. });
        self.rows.iter().filter(is_gap)
    }
}

/// A key of another engine and its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ImportedKey {
    /// Its dotted path there.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Its place; `None` for a default.
    pub place: Option<SourceLocation>,
    /// Earlier places, which were overridden.
    pub replaces: Vec<SourceLocation>,
    /// True if only a run decides its value; `value` is then the written text, or all candidates.
    pub open: bool,
    /// Outcome of the import.
    #[serde(flatten)]
    pub outcome: KeyOutcome,
}

impl ImportedKey {
    /// Settings that it maps to.
    pub(super) fn settings(&self) -> &[Setting] {
        match &self.outcome {
            KeyOutcome::Mapped { settings, .. } => settings,
            _ => &[],
        }
    }
}

/// Outcome of a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum KeyOutcome {
    /// It has a counterpart here.
    Mapped {
        /// Settings that it maps to.
        settings: Vec<Setting>,
        /// Remark on them; often empty.
        note: String,
    },
    /// Nothing here needs it for the same results.
    NotNeeded {
        /// Reason.
        why: String,
    },
    /// Nothing here does it, and results depend on it.
    Cannot {
        /// Reason, and the alternative.
        why: String,
    },
    /// No table has it.
    Unknown {
        /// The most similar key of the tables, if one is close.
        nearest: Option<String>,
    },
}

/// A setting of ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Its dotted path.
    pub key: String,
    /// Its value.
    pub value: Value,
}
