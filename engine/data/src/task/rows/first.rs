//! The first row of files, to inspect rows before a task is built.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::{Map, Value};

use super::files::{RowFiles, TRAIN, VALIDATION};
use super::store::Rows;
use crate::task::TaskError;
use crate::task::template::Row;

impl RowFiles {
    /// The fields of the first row to train on. Relative paths are resolved against `base`; files of the Hub are
    /// downloaded.
    ///
    /// # Errors
    /// `TaskError` for files that are missing, unreadable or empty.
    pub fn first_row(&self, base: &Path) -> Result<Map<String, Value>, TaskError> {
        let first = self.first(base, TRAIN)?;
        Ok(first.map(|row| row.fields.into()).unwrap_or_default())
    }

    /// Errors of a setting's files that are unavailable or cannot be opened, without reading rows. Relative paths are
    /// resolved against `base`; files of the Hub are downloaded.
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

    /// The first row of a setting's files, if they can be read.
    pub(crate) fn first(&self, base: &Path, setting: &'static str) -> Result<Option<Row>, TaskError> {
        let files = self.list(base, setting)?.concat();
        let first = Mutex::new(None);
        Rows::read(&files, setting, Some(1), &|row| {
            *first.lock().unwrap_or_else(PoisonError::into_inner) = Some(row);
            Ok(())
        })?;
        Ok(first.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if the same source has separate validation files, none of which are training files.
    pub fn holds_out(&self, base: &Path) -> bool {
        let files = |setting| -> Option<Vec<PathBuf>> { Some(self.list(base, setting).ok()?.concat()) };
        match (files(TRAIN), files(VALIDATION)) {
            (Some(train), Some(held_out)) => held_out.iter().all(|file| !train.contains(file)),
            _ => false,
        }
    }
}
