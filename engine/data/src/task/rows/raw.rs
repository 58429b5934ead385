//! Unparsed rows of files.

use std::ops::ControlFlow;
use std::path::Path;

use serde_json::{Map, Value};

use crate::task::error::{RowLocation, Unit};
use firebrick_backends::allocation_limit::AllocationLimit;
use firebrick_spec::file::MAX_LINE_BYTES;

/// What the values of a row may take.
pub(super) const ROW_LIMIT: AllocationLimit = AllocationLimit::total(4 * MAX_LINE_BYTES);

/// Bytes of a row beside its text.
const ROW_BYTES: usize = 64;

/// Reason to stop reading a file that expands to more than [`expanded`].
pub(super) const TOO_MUCH: &str =
    "it expands to more than 500 times its size, as no dataset does; is it made to exhaust memory?";

/// Most bytes of all rows of a file with `bytes`.
pub(super) fn expanded(bytes: u64) -> u64 {
    bytes.saturating_mul(500).max(64 << 20)
}

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

    /// Approximate bytes.
    pub fn bytes(&self) -> usize {
        match &self.content {
            RawContent::Text { text, .. } => ROW_BYTES + text.len(),
            RawContent::Fields(fields) => ROW_BYTES + bytes_of_fields(fields),
        }
    }

    /// Its place.
    pub fn place(&self, path: &Path) -> RowLocation {
        RowLocation { path: path.to_owned(), line: self.number, unit: self.unit }
    }
}

fn bytes_of_fields(fields: &Map<String, Value>) -> usize {
    fields.iter().map(|(name, value)| name.len() + bytes_of(value)).sum()
}

fn bytes_of(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(list) => list.iter().map(bytes_of).sum(),
            Value::Object(fields) => bytes_of_fields(fields),
            Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        }
}
