//! Errors of unreadable files.

use super::entry::SourceLocation;

/// Result of reading files.
pub(crate) type ImportResult<T = ()> = Result<T, ImportError>;

/// Errors of reading another engine's files. Unknown keys are no error: the report lists them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// A file does not have the format of its name.
    #[error("{place}: {detail}")]
    Unreadable {
        /// The file, and the line if known.
        place: SourceLocation,
        /// Expectation, finding, remedy.
        detail: String,
    },
    /// The files configure a run that is not supported, such as supervised training.
    #[error("{0}")]
    OtherRun(String),
    /// No engine has any key of the files.
    #[error("{0}")]
    UnknownEngine(String),
}

impl ImportError {
    pub(super) fn at(file: &str, line: Option<usize>, detail: impl Into<String>) -> Self {
        Self::Unreadable { place: SourceLocation { file: file.to_owned(), line }, detail: detail.into() }
    }
}
