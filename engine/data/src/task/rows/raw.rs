//! Unparsed rows of files.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::task::error::{RowLocation, Unit};

/// Assumed bytes of a row of a binary file, whose text is not known yet.
const UNKNOWN_BYTES: usize = 512;

/// Receives a row; breaks if no more are wanted.
pub(super) type Sink<'a> = dyn FnMut(Raw) -> ControlFlow<()> + 'a;

/// Reason why reading a file stopped.
#[derive(Debug)]
pub(super) enum Unread {
    /// It is incomplete, or has other content than its name says.
    Damaged(String),
    /// It has the named unsupported part; with the remedy.
    Refused(String),
}

impl<E: std::error::Error> From<E> for Unread {
    fn from(error: E) -> Self {
        Self::Damaged(error.to_string())
    }
}

/// An unparsed row.
pub(super) struct Raw {
    /// The line or the row, from 1.
    pub number: usize,
    pub unit: Unit,
    pub content: RawContent,
}

pub(super) enum RawContent {
    /// JSON, and its offset if it is a line of a plain file.
    Text { offset: u64, text: Vec<u8> },
    /// Parsed fields, with marks.
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

    /// Approximate bytes of its text.
    pub fn bytes(&self) -> usize {
        match &self.content {
            RawContent::Text { text, .. } => text.len(),
            RawContent::Fields(_) => UNKNOWN_BYTES,
        }
    }

    /// Its place.
    pub fn place(&self, path: &Path) -> RowLocation {
        RowLocation { path: path.to_owned(), line: self.number, unit: self.unit }
    }
}
