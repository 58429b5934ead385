//! A run's folder: its name and its configuration.

use firebrick_engine::{Error, Result};
use firebrick_spec::file::{MAX_CONFIG_BYTES, read_text};
use std::path::Path;

/// A run's configuration.
pub(super) fn config(folder: &Path) -> Result<String> {
    if !folder.is_dir() {
        return Err(report_error(folder, "there is no such run folder".into()));
    }
    let path = folder.join("config.yaml");
    if !path.is_file() {
        let detail = "it contains no run (no config.yaml); name the folder that the run's `output` is";
        return Err(report_error(folder, detail.into()));
    }
    read_text(&path, MAX_CONFIG_BYTES).map_err(Error::io("read", path))
}

pub(super) fn report_error(path: &Path, detail: String) -> Error {
    Error::Report { path: path.to_owned(), detail }
}

/// The last component of a folder's path.
pub(super) fn name(folder: &Path) -> String {
    let absolute = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let last = absolute.file_name().map(|name| name.to_string_lossy().into_owned());
    last.unwrap_or_else(|| folder.display().to_string())
}
