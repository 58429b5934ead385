//! Rows of text files: JSON Lines and JSON lists, plain or compressed.

use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::path::Path;

use super::format::Compression;
use super::raw::{Raw, Sink, TOO_MUCH, Unread, expanded};
use firebrick_spec::file::{MAX_LINE_BYTES, read_line};
use flate2::read::MultiGzDecoder;

/// Bytes of a read buffer.
const BUFFER_BYTES: usize = 1 << 18;

/// The byte order mark of UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A file's bytes, decompressed.
pub(super) fn open(path: &Path, compression: Compression) -> Result<Box<dyn BufRead>, Unread> {
    let file = File::open(path)?;
    let left = expanded(file.metadata()?.len());
    let decompressed: Box<dyn Read> = match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => {
            let decoder = MultiGzDecoder::new(BufReader::with_capacity(BUFFER_BYTES, file));
            Box::new(Decompressed { decoder, left })
        }
        Compression::Zstd => Box::new(Decompressed { decoder: zstd::stream::read::Decoder::new(file)?, left }),
    };
    Ok(Box::new(BufReader::with_capacity(BUFFER_BYTES, decompressed)))
}

/// A decompressor, up to a number of bytes.
struct Decompressed<R> {
    decoder: R,
    left: u64,
}

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(into)?;
        let left = self.left.checked_sub(read as u64);
        self.left = left.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, TOO_MUCH))?;
        Ok(read)
    }
}

/// Sends every line that is not blank to `sink`.
pub(super) fn lines(mut bytes: Box<dyn BufRead>, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let (mut offset, mut number) = (0, 0);
    loop {
        let mut line = Vec::new();
        if !read_line(&mut *bytes, &mut line)? {
            return Ok(());
        }
        let read = line.len();
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
        if entries.text.len() > MAX_LINE_BYTES {
            let number = entries.number + 1;
            let detail = format!("row {number} has more than {MAX_LINE_BYTES} bytes, the most that a row may have");
            return Err(Unread::Damaged(detail));
        }
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
