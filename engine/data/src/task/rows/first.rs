//! The first row of some files, for whoever asks what rows look like before a task is set up.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};

use super::files::{RowFiles, TRAIN, VALIDATION};
use super::store::Rows;
use crate::task::TaskError;
use crate::task::template::Row;

impl RowFiles {
    /// The fields of the first row to train on. Relative paths are resolved against `base`; what is of the Hub is
    /// fetched.
    ///
    /// # Errors
    /// Where the files are not there, cannot be read, or have no rows.
    pub fn first_row(&self, base: &Path) -> Result<Map<String, Value>, TaskError> {
        let first = self.first(base, TRAIN)?;
        Ok(first.map(|row| row.fields.into()).unwrap_or_default())
    }

    /// The files of a setting that cannot be had or opened, each with its reason: no row is read. Relative paths are
    /// resolved against `base`; what is of the Hub is fetched.
    #[must_use]
    pub fn missing(&self, base: &Path, setting: &'static str) -> Vec<TaskError> {
        let files = match self.list(base, setting) {
            Ok(files) => files.concat(),
            Err(error) => return vec![error],
        };
        let unreadable = files.into_iter().filter_map(|path| {
            let error = File::open(&path).err()?;
            Some(TaskError::Read { setting, path, error })
        });
        unreadable.collect()
    }

    /// The first row of a setting's files, where they can be read.
    pub(crate) fn first(&self, base: &Path, setting: &'static str) -> Result<Option<Row>, TaskError> {
        let files = self.list(base, setting)?.concat();
        let first = Mutex::new(None);
        Rows::read(&files, setting, Some(1), &|row| {
            *first.lock().unwrap_or_else(PoisonError::into_inner) = Some(row);
            Ok(())
        })?;
        Ok(first.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether the same place has rows of its own for validation: files whose names say so, and none of those to train
    /// on.
    #[must_use]
    pub fn holds_out(&self, base: &Path) -> bool {
        let files = |setting| -> Option<Vec<PathBuf>> { Some(self.list(base, setting).ok()?.concat()) };
        match (files(TRAIN), files(VALIDATION)) {
            (Some(train), Some(held_out)) => held_out.iter().all(|file| !train.contains(file)),
            _ => false,
        }
    }
}
