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
pub(super) struct Unread(pub String);

impl<E: std::error::Error> From<E> for Unread {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// A row as its file has it.
pub(super) struct Raw {
    /// The line or the row, from 1.
    pub number: usize,
    pub content: RawContent,
}

pub(super) enum RawContent {
    /// A line, and where in the file it begins.
    Line { offset: u64, text: Vec<u8> },
    /// What has been read into fields already.
    Fields(Map<String, Value>),
}

impl Raw {
    pub fn line(number: usize, offset: u64, text: Vec<u8>) -> Self {
        let content = RawContent::Line { offset, text };
        Self { number, content }
    }

    pub fn row(number: usize, fields: Map<String, Value>) -> Self {
        let content = RawContent::Fields(fields);
        Self { number, content }
    }

    /// Bytes of its text, about.
    pub fn bytes(&self) -> usize {
        match &self.content {
            RawContent::Line { text, .. } => text.len(),
            RawContent::Fields(_) => UNKNOWN_BYTES,
        }
    }

    /// Where it stands.
    pub fn place(&self, path: &Path) -> RowLocation {
        RowLocation {
            path: path.to_owned(),
            line: self.number,
            unit: match self.content {
                RawContent::Line { .. } => Unit::Line,
                RawContent::Fields(_) => Unit::Row,
            },
        }
    }
}
