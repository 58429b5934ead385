//! The first row of some files, for whoever asks what rows look like before a task is set up.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};

use super::files::RowFiles;
use super::store::Rows;
use crate::task::TaskError;

/// The settings whose files are looked at.
const TRAIN: &str = "task.train";
const VALIDATION: &str = "task.validation";

impl RowFiles {
    /// The fields of the first row to train on. Relative paths are resolved against `base`; what is of the Hub is fetched.
    ///
    /// # Errors
    /// Where the files are not there, cannot be read, or have no rows.
    pub fn first_row(&self, base: &Path) -> Result<Map<String, Value>, TaskError> {
        let files = self.list(base, TRAIN)?.concat();
        let first = Mutex::new(Map::new());
        Rows::read(&files, TRAIN, Some(1), &|row| {
            *first.lock().unwrap_or_else(PoisonError::into_inner) = row.fields;
            Ok(())
        })?;
        Ok(first.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the same place has rows of its own for validation: files whose names say so, and none of those to train on.
    #[must_use]
    pub fn holds_out(&self, base: &Path) -> bool {
        let files =
            |setting| -> Option<Vec<PathBuf>> { Some(self.list(base, setting).ok()?.concat()) };
        match (files(TRAIN), files(VALIDATION)) {
            (Some(train), Some(held_out)) => held_out.iter().all(|file| !train.contains(file)),
            _ => false,
        }
    }
}
