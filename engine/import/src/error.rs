//! What of a file cannot be read at all.

use super::entry::SourceLocation;

/// Errors of reading another engine's files. Keys that are not known are no error: they stand in the table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// A file is not what its name says.
    #[error("{place}: {detail}")]
    Unreadable {
        /// The file, and the line where it is known.
        place: SourceLocation,
        /// What was expected, what was found, what to do.
        detail: String,
    },
    /// The files are of a run that is none of reinforcement learning, or of one that cannot be done.
    #[error("{0}")]
    OtherRun(String),
    /// No key of the files is one of an engine.
    #[error("{0}")]
    UnknownEngine(String),
}

impl ImportError {
    pub(super) fn at(file: &str, line: Option<usize>, detail: impl Into<String>) -> Self {
        Self::Unreadable { place: SourceLocation { file: file.to_owned(), line }, detail: detail.into() }
    }
}
