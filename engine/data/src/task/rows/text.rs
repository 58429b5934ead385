//! Rows of text files: JSON Lines and JSON lists, as they are or decompressed while they are read.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::format::Compression;
use super::raw::{Raw, Sink, Unread};
use flate2::read::MultiGzDecoder;

/// Bytes that are asked of a file at a time.
const BUFFER: usize = 1 << 18;

/// The mark of UTF-8 that some programs write at the start of a file.
const MARK: &[u8] = b"\xEF\xBB\xBF";

/// A file's bytes, decompressed.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead>, Unread> {
    let file = File::open(path)?;
    let decompressed: Box<dyn Read> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER, file))),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::new(file)?),
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER, decompressed)))
}

/// Gives every line that is not blank.
pub(super) fn lines(mut bytes: Box<dyn BufRead>, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let (mut offset, mut number) = (0, 0);
    loop {
        let mut line = Vec::new();
        let read = bytes.read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        number += 1;
        let start = if number == 1 && line.starts_with(MARK) { MARK.len() } else { 0 };
        let blank = line[start..].iter().all(u8::is_ascii_whitespace);
        if start > 0 {
            line.drain(..start);
        }
        let begins = offset + start as u64;
        offset += read as u64;
        if !blank && sink(Raw::line(number, begins, line)).is_break() {
            return Ok(());
        }
    }
}

/// Gives every entry of one JSON list; lines where the file does not begin with a bracket.
pub(super) fn list(mut bytes: Box<dyn BufRead>, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let first = bytes.fill_buf()?;
    let text = first.strip_prefix(MARK).unwrap_or(first);
    let blank = text.iter().take_while(|b| b.is_ascii_whitespace()).count();
    if text.get(blank) != Some(&b'[') {
        return lines(bytes, sink);
    }
    let before = first.len() - text.len() + blank + 1;
    bytes.consume(before);
    let mut entries = Entries::default();
    loop {
        let chunk = bytes.fill_buf()?;
        if chunk.is_empty() && !entries.ended {
            return Err(Unread::Damaged(format!("the list ends within row {}", entries.number + 1)));
        }
        if entries.ended {
            return match chunk.iter().find(|b| !b.is_ascii_whitespace()) {
                Some(_) => Err(Unread::Damaged("there is more text after the list".into())),
                None if chunk.is_empty() => Ok(()),
                None => {
                    let len = chunk.len();
                    bytes.consume(len);
                    continue;
                }
            };
        }
        let (used, entry) = entries.take(chunk);
        bytes.consume(used);
        if let Some(entry) = entry
            && sink(Raw::entry(entries.number, entry)).is_break()
        {
            return Ok(());
        }
    }
}

/// Takes the entries of a list one by one, so that it is never held whole. They are parsed later.
#[derive(Default)]
struct Entries {
    /// The text of the one that has begun.
    text: Vec<u8>,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Entries that were given.
    number: usize,
    ended: bool,
}

impl Entries {
    /// Takes bytes until an entry or the list ends: how many, and the entry.
    fn take(&mut self, bytes: &[u8]) -> (usize, Option<Vec<u8>>) {
        for (at, &byte) in bytes.iter().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth > 0 => self.depth -= 1,
                b']' | b',' if self.depth == 0 => {
                    self.ended = byte == b']';
                    let is_empty_list = self.ended && self.number == 0 && self.text.is_empty();
                    self.number += usize::from(!is_empty_list);
                    return (at + 1, (!is_empty_list).then(|| std::mem::take(&mut self.text)));
                }
                _ if byte.is_ascii_whitespace() && self.text.is_empty() => continue,
                _ => {}
            }
            self.text.push(byte);
        }
        (bytes.len(), None)
    }
}
