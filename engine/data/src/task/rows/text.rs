//! Rows of text files: JSON Lines and JSON lists, plain or compressed.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use super::format::Compression;
use super::raw::{Raw, Sink, Unread};
use flate2::read::MultiGzDecoder;

/// Bytes of a read buffer.
const BUFFER_BYTES: usize = 1 << 18;

/// The byte order mark of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A file's bytes, decompressed.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead>, Unread> {
    let file = File::open(path)?;
    let decompressed: Box<dyn Read> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, file))),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::new(file)?),
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, decompressed)))
}

/// Sends every line that is not blank to `sink`.
pub(super) fn lines(mut bytes: Box<dyn BufRead>, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let (mut offset, mut number) = (0, 0);
    loop {
        let mut line = Vec::new();
        let read = bytes.read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        number += 1;
        let start = if number == 1 && line.starts_with(BYTE_ORDER_MARK) { BYTE_ORDER_MARK.len() } else { 0 };
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

/// Sends every entry of one JSON list to `sink`; lines if the file does not begin with a bracket.
pub(super) fn list(mut bytes: Box<dyn BufRead>, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let first = bytes.fill_buf()?;
    let text = first.strip_prefix(BYTE_ORDER_MARK).unwrap_or(first);
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

/// Splits a list into entries one by one, so that it is never held completely. They are parsed later.
#[derive(Default)]
struct Entries {
    /// The text of the current entry.
    text: Vec<u8>,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// Number of entries so far.
    number: usize,
    ended: bool,
}

impl Entries {
    /// Reads bytes until an entry or the list ends; returns their number, and the entry.
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
