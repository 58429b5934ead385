//! Errors of memory settings and plans.

use crate::Infeasible;
use std::path::PathBuf;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Settings that cannot work.
    #[error("config: {0}")]
    Config(String),
    /// A plan that cannot be executed on the model.
    #[error("plan: {0}")]
    Plan(String),
    /// No plan fits the budget.
    #[error("{0}")]
    Infeasible(Box<Infeasible>),
    /// A file could not be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// A model's configuration.
    #[error(transparent)]
    Arch(#[from] firebrick_spec::Error),
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
