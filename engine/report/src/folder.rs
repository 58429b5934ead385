//! A run's folder: its name and its configuration.

use firebrick_engine::{Error, Result};
use std::path::Path;

/// A run's configuration.
pub(super) fn config(folder: &Path) -> Result<String> {
    if !folder.is_dir() {
        return Err(refused(folder, "there is no such run folder".into()));
    }
    let path = folder.join("config.yaml");
    if !path.is_file() {
        let detail = "it contains no run (no config.yaml); name the folder that the run's `output` is";
        return Err(refused(folder, detail.into()));
    }
    let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
    String::from_utf8(bytes).map_err(|_| refused(&path, "it is not text in UTF-8".into()))
}

pub(super) fn refused(path: &Path, detail: String) -> Error {
    Error::Report { path: path.to_owned(), detail }
}

/// The last name of a folder's path.
pub(super) fn name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let last = whole.file_name().map(|name| name.to_string_lossy().into_owned());
    last.unwrap_or_else(|| folder.display().to_string())
}
