//! Files of a run that may be missing, or cut off by a kill.

use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_engine::{Error, Result};
use firebrick_spec::file::{self, MAX_TEXT_BYTES, read_line};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::File;
use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

/// What the values of a JSON file may take.
const JSON_LIMIT: AllocationLimit = AllocationLimit::total(160 << 20);

/// Position of a line in its file.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    offset: u64,
    bytes: usize,
}

/// The result of reading a file of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadResult {
    /// There is no such file.
    Missing,
    /// It was read, with some invalid lines.
    Read {
        /// Lines that were skipped.
        broken: u64,
    },
}

impl ReadResult {
    /// A sentence on a file that is missing or has broken lines.
    pub fn note(self, name: &str) -> Option<String> {
        match self {
            Self::Missing => Some(format!("There is no {name}.")),
            Self::Read { broken: 0 } => None,
            Self::Read { broken: 1 } => Some(format!(
                "{name}: 1 line could not be read and is skipped (a run that was killed leaves such a line)."
            )),
            Self::Read { broken } => Some(format!("{name}: {broken} lines could not be read and are skipped.")),
        }
    }
}

/// Reads a JSON Lines file, one line in memory at a time; `each` returns true for valid values.
pub fn read<T: DeserializeOwned>(path: &Path, mut each: impl FnMut(T, Span) -> bool) -> Result<ReadResult> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(ReadResult::Missing),
        Err(e) => return Err(Error::io("read", path)(e)),
    };
    let mut reader = BufReader::with_capacity(1 << 18, file);
    let (mut line, mut offset, mut broken) = (Vec::new(), 0, 0);
    loop {
        if !read_line(&mut reader, &mut line).map_err(Error::io("read", path))? {
            return Ok(ReadResult::Read { broken });
        }
        let bytes = line.len();
        let span = Span { offset, bytes };
        offset += bytes as u64;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let is_valid = serde_json::from_slice(&line).is_ok_and(|value| each(value, span));
        broken += u64::from(!is_valid);
    }
}

/// Reads single lines of a file again.
pub struct Lines {
    file: File,
}

impl Lines {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("read", path))?;
        Ok(Self { file })
    }

    /// The line at a position, unless the file has changed.
    pub fn at<T: DeserializeOwned>(&mut self, span: Span) -> Option<T> {
        let mut line = vec![0; span.bytes];
        self.file.seek(SeekFrom::Start(span.offset)).ok()?;
        self.file.read_exact(&mut line).ok()?;
        serde_json::from_slice(&line).ok()
    }
}

/// Reads a JSON file. A missing or broken one gives `None` and a note; the note on a missing one ends with
/// `why`.
pub fn json(folder: &Path, name: &str, why: &str, notes: &mut Vec<String>) -> Option<Value> {
    let note = match file::read(&folder.join(name), MAX_TEXT_BYTES) {
        Ok(text) => match limited(JSON_LIMIT, &format!("reading {}", folder.join(name).display()), || {
            serde_json::from_slice(&text)
        }) {
            Ok(value) => return Some(value),
            Err(error) => format!("{name} could not be read: {error}."),
        },
        Err(error) if error.kind() == ErrorKind::NotFound => format!("There is no {name}{why}."),
        Err(error) => format!("{name} could not be read: {error}."),
    };
    notes.push(note);
    None
}
