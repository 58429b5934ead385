//! Models and datasets of the Hugging Face Hub: fetched once into the cache folder that Python's libraries share, found
//! there afterwards without a network.
//!
//! A repository is named where a local path may stand: `owner/name`, `owner/name@revision`, or as a URL of
//! `huggingface_hub`'s file system, `hf://datasets/owner/name@revision/file`. What exists locally is never looked for
//! elsewhere.

mod cache;
mod fetch;
mod home;
mod name;
mod progress;
mod settings;

pub use home::expand_home;
pub use name::{HubName, RepoKind};
pub use progress::{Download, on_download};
pub use settings::{Hub, stay_offline};

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};

/// A repository that could not be had.
#[derive(Debug, thiserror::Error)]
#[error("{name} (Hugging Face Hub): {detail}")]
pub struct HubError {
    /// The repository, as `owner/name`, with its revision if that is not `main`.
    pub name: String,
    /// What was expected, what was found, what to do.
    pub detail: String,
}

/// Which of a model's files are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelFiles {
    /// `config.json` alone.
    Config,
    /// The tokenizer's files and the configs.
    Tokenizer,
    /// These and the weights.
    All,
}

/// Folders that this process has found with what is in them, so that a run asks once.
static FOUND: LazyLock<Mutex<HashMap<PathBuf, (ModelFiles, PathBuf)>>> = LazyLock::new(Mutex::default);

/// The local folder of a model: the path itself where it exists or is no name of a repository; else the repository's
/// snapshot in the cache folder, fetched where it is not there.
///
/// # Errors
/// Those of [`Hub::model`], for a name of the Hub.
pub fn model_folder(path: &Path, wanted: ModelFiles) -> Result<PathBuf, HubError> {
    let Some(name) = HubName::of_path(path, RepoKind::Model) else {
        return Ok(path.to_owned());
    };
    // a map of finished look-ups is whole whoever panicked
    let found = || FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((has, folder)) = found().get(path)
        && *has >= wanted
    {
        return Ok(folder.clone());
    }
    let folder = Hub::from_env().model(&name, wanted)?;
    found().insert(path.to_owned(), (wanted, folder.clone()));
    Ok(folder)
}

#[cfg(test)]
mod tests;
