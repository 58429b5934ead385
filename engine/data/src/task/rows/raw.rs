//! A row as its file has it, before it is parsed and checked, and who takes it.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::task::error::{RowLocation, Unit};

/// Bytes that a row of a binary file is taken for, as its text is not known yet.
const UNKNOWN_BYTES: usize = 512;

/// Takes a row; breaks where no more are wanted.
pub(super) type Sink<'a> = dyn FnMut(Raw) -> ControlFlow<()> + 'a;

/// Why a file could not be read on.
#[derive(Debug)]
pub(super) enum Unread {
    /// It is not whole, or not what its name says.
    Damaged(String),
    /// It has what is not read, which this names, with what to do.
    Refused(String),
}

impl<E: std::error::Error> From<E> for Unread {
    fn from(error: E) -> Self {
        Self::Damaged(error.to_string())
    }
}

/// A row as its file has it.
pub(super) struct Raw {
    /// The line or the row, from 1.
    pub number: usize,
    pub unit: Unit,
    pub content: RawContent,
}

pub(super) enum RawContent {
    /// JSON, and where in the file it begins if that is a line of a plain file.
    Text { offset: u64, text: Vec<u8> },
    /// What has been read into fields already, with marks.
    Fields(Map<String, Value>),
}

impl Raw {
    pub fn line(number: usize, offset: u64, text: Vec<u8>) -> Self {
        Self { number, unit: Unit::Line, content: RawContent::Text { offset, text } }
    }

    /// An entry of a list.
    pub fn entry(number: usize, text: Vec<u8>) -> Self {
        Self { number, unit: Unit::Row, content: RawContent::Text { offset: 0, text } }
    }

    pub fn fields(number: usize, unit: Unit, fields: Map<String, Value>) -> Self {
        Self { number, unit, content: RawContent::Fields(fields) }
    }

    /// Bytes of its text, about.
    pub fn bytes(&self) -> usize {
        match &self.content {
            RawContent::Text { text, .. } => text.len(),
            RawContent::Fields(_) => UNKNOWN_BYTES,
        }
    }

    /// Where it stands.
    pub fn place(&self, path: &Path) -> RowLocation {
        RowLocation { path: path.to_owned(), line: self.number, unit: self.unit }
    }
}
