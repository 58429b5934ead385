//! The account of an import: what became of every key.

use super::assembly::Missing;
use super::engine::Engine;
use super::entry::SourceLocation;
use serde::Serialize;
use serde_json::Value;

/// A configuration of another engine as one of ours, with the account of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Imported {
    /// Whose files these are.
    pub engine: Engine,
    /// The configuration, as YAML.
    pub config: String,
    /// Every key of the files, in their order.
    pub rows: Vec<ImportedKey>,
    /// Defaults of the engine that the files leave out and that set something here.
    pub assumed: Vec<ImportedKey>,
    /// What a run needs and the files do not say: the configuration has a value to be replaced.
    pub missing: Vec<Missing>,
    /// Settings that were changed to go with others, and why.
    pub adjusted: Vec<String>,
    /// What was passed over in the files, with its place.
    pub notes: Vec<String>,
    /// Why the configuration is refused, where it is.
    pub problem: Option<String>,
}

impl Imported {
    /// Keys of the files that results may depend on and that the configuration does not have, in their order.
    pub fn gaps(&self) -> impl Iterator<Item = &ImportedKey> {
        let is_gap = |row: &&ImportedKey| matches!(row.outcome, KeyOutcome::Cannot { .. } | KeyOutcome::Unknown { .. });
        self.rows.iter().filter(is_gap)
    }
}

/// A key of another engine, and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ImportedKey {
    /// Its dotted path there.
    pub key: String,
    /// Its value.
    pub value: Value,
    /// Where it stands; nothing for a default.
    pub place: Option<SourceLocation>,
    /// Where it stood before that, and was overridden.
    pub replaces: Vec<SourceLocation>,
    /// Whether only a run decides its value; the one above is as it is written, or all candidates.
    pub open: bool,
    /// What became of it.
    #[serde(flatten)]
    pub outcome: KeyOutcome,
}

impl ImportedKey {
    /// The settings that it became.
    pub(super) fn settings(&self) -> &[Setting] {
        match &self.outcome {
            KeyOutcome::Mapped { settings, .. } => settings,
            _ => &[],
        }
    }
}

/// What became of a key.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum KeyOutcome {
    /// It has a counterpart here.
    Mapped {
        /// The settings that it became.
        settings: Vec<Setting>,
        /// What there is to say of them; often nothing.
        note: String,
    },
    /// Nothing here needs it for the same results.
    NotNeeded {
        /// Why.
        why: String,
    },
    /// Nothing here does it, and results depend on it.
    Cannot {
        /// Why, and what to do instead.
        why: String,
    },
    /// No table has it.
    Unknown {
        /// The key of a table that is spelled most alike, where one is.
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
