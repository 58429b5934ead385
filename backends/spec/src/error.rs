//! Errors of reading a model's configuration.

use std::path::PathBuf;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A JSON file does not say what it should.
    #[error("{}: {detail}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The expected and the actual content.
        detail: String,
    },
    /// The architecture is not supported.
    #[error("unsupported architecture {found:?}; supported: {known}")]
    UnknownArchitecture {
        /// The architecture in the config.
        found: String,
        /// The supported ones, separated by commas.
        known: String,
    },
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
