//! Models and datasets of the Hugging Face Hub: downloaded once into the cache folder of Python's libraries,
//! then available without a network.
//!
//! A repository's name can take the place of a local path: `owner/name`, `owner/name@revision`, or as a URL of
//! `huggingface_hub`'s file system, `hf://datasets/owner/name@revision/file`. Existing local paths take
//! precedence.

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

/// An unavailable repository.
#[derive(Debug, thiserror::Error)]
#[error("{name} (Hugging Face Hub): {detail}")]
pub struct HubError {
    /// The repository, as `owner/name`, with its revision if that is not `main`.
    pub name: String,
    /// Expectation, finding, remedy.
    pub detail: String,
}

/// The wanted files of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ModelFiles {
    /// `config.json` alone.
    Config,
    /// The tokenizer's files and the configs.
    Tokenizer,
    /// These and the weights.
    All,
}

/// Model folders that this process has resolved, with their files, so that a run asks once.
static RESOLVED: LazyLock<Mutex<HashMap<PathBuf, (ModelFiles, PathBuf)>>> = LazyLock::new(Mutex::default);

/// The local folder of a model: the path itself if it exists or is no repository's name; else the repository's
/// snapshot in the cache folder, downloaded if necessary.
///
/// # Errors
/// Those of [`Hub::model`], for a name of the Hub.
pub fn model_folder(path: &Path, wanted: ModelFiles) -> Result<PathBuf, HubError> {
    let Some(name) = HubName::of_path(path, RepoKind::Model) else {
        return Ok(path.to_owned());
    };
    // the map only has finished look-ups, even after a panic
    let resolved = || RESOLVED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((files, folder)) = resolved().get(path)
        && *files >= wanted
    {
        return Ok(folder.clone());
    }
    let folder = Hub::from_env().model(&name, wanted)?;
    resolved().insert(path.to_owned(), (wanted, folder.clone()));
    Ok(folder)
}

#[cfg(test)]
mod tests;
