//! Random access to rows with little memory: rows of a plain text file are read again from their
//! positions, all others are held compressed.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::read::{Block, Check, Content, parse, read_blocks};
use crate::task::TaskError;
use crate::task::error::RowLocation;
use crate::task::template::Row;

/// A file whose rows have been read.
struct RowFile {
    path: PathBuf,
    /// Kept open, so that a replaced file stays the checked one.
    file: Mutex<File>,
    /// Index of its first row.
    first: u64,
}

/// The rows of files, each checked once.
pub struct Rows {
    files: Vec<RowFile>,
    /// With the index of the first row, and of the file.
    blocks: Vec<(u64, u32, Block)>,
    len: u64,
    /// The last unpacked block: neighbors are often read one after the other.
    unpacked: Mutex<Option<(usize, Arc<Vec<u8>>)>>,
}

impl std::fmt::Debug for Rows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files: Vec<&Path> = self.paths().collect();
        f.debug_struct("Rows").field("files", &files).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Rows {
    /// Reads files, at most `limit` rows in all, and checks every row. A file without rows is an
    /// error.
    ///
    /// # Errors
    /// `TaskError` with file and line.
    pub fn read(
        files: &[PathBuf],
        setting: &'static str,
        limit: Option<u64>,
        check: &Check<'_>,
    ) -> Result<Self, TaskError> {
        let mut rows = Self { files: Vec::new(), blocks: Vec::new(), len: 0, unpacked: Mutex::new(None) };
        for path in files {
            let left = limit.map_or(u64::MAX, |limit| limit - rows.len);
            if left == 0 {
                break;
            }
            rows.add(path, setting, left, check)?;
        }
        Ok(rows)
    }

    fn add(&mut self, path: &Path, setting: &'static str, limit: u64, check: &Check<'_>) -> Result<(), TaskError> {
        let unreadable = |error| TaskError::Read { setting, path: path.to_owned(), error };
        let file = File::open(path).map_err(unreadable)?;
        let blocks = read_blocks(path, limit, check)?;
        if blocks.is_empty() {
            return Err(TaskError::Empty { setting, path: path.to_owned() });
        }
        let place = self.files.len() as u32;
        self.files.push(RowFile { path: path.to_owned(), file: Mutex::new(file), first: self.len });
        for block in blocks {
            let rows = block.numbers.len() as u64;
            self.blocks.push((self.len, place, block));
            self.len += rows;
        }
        Ok(())
    }

    /// The files that were read.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The number of rows.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns true if there is no row.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The rows of each source, given their files in this order; empty beyond a limit.
    pub fn of_sources(&self, sources: &[Vec<PathBuf>]) -> impl Iterator<Item = Range<u64>> {
        let first = |at: usize| self.files.get(at).map_or(self.len, |file| file.first);
        sources.iter().scan(0, move |files, source| {
            let from = *files;
            *files += source.len();
            Some(first(from)..first(*files))
        })
    }

    /// A row. `index` is below [`Rows::len`].
    ///
    /// # Errors
    /// `TaskError` if the file cannot be read, or has changed since.
    pub fn get(&self, index: u64) -> Result<Row, TaskError> {
        let at = self.blocks.partition_point(|(first, ..)| *first <= index) - 1;
        let (first, file, block) = &self.blocks[at];
        let within = (index - first) as usize;
        let source = &self.files[*file as usize];
        let place = RowLocation { path: source.path.clone(), line: block.numbers[within] as usize, unit: block.unit };
        let gone = |error: std::io::Error| TaskError::Changed { place: place.clone(), detail: error.to_string() };
        let fields = match &block.content {
            Content::Placed { offset, spans } => {
                let (start, len) = spans[within];
                let line = source.read(offset + u64::from(start), len).map_err(gone)?;
                parse(&line, &place)
                    .map_err(|error| TaskError::Changed { place: place.clone(), detail: error.to_string() })?
            }
            Content::Packed { bytes, len } => {
                let text = self.unpack(at, bytes, *len).map_err(gone)?;
                let line = text.split(|byte| *byte == b'\n').nth(within);
                parse(line.unwrap_or_default(), &place)?
            }
        };
        Ok(Row { place, fields })
    }

    /// Bytes of the held rows.
    pub fn held_bytes(&self) -> usize {
        let held = |block: &Block| {
            let content = match &block.content {
                Content::Placed { spans, .. } => size_of_val(spans.as_slice()),
                Content::Packed { bytes, .. } => bytes.len(),
            };
            content + size_of_val(block.numbers.as_slice())
        };
        self.blocks.iter().map(|(.., block)| held(block)).sum()
    }

    fn unpack(&self, at: usize, bytes: &[u8], len: usize) -> std::io::Result<Arc<Vec<u8>>> {
        // the value is whole, even after a panic
        let kept = || self.unpacked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, text)) = kept().as_ref().filter(|(block, _)| *block == at) {
            return Ok(Arc::clone(text));
        }
        let text = Arc::new(zstd::bulk::decompress(bytes, len)?);
        *kept() = Some((at, Arc::clone(&text)));
        Ok(text)
    }
}

impl RowFile {
    fn read(&self, offset: u64, len: u32) -> std::io::Result<Vec<u8>> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(offset))?;
        let mut line = vec![0; len as usize];
        file.read_exact(&mut line)?;
        Ok(line)
    }
}
