//! Rows of text files: JSON Lines and JSON lists, as they are or decompressed while they are read.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde::Deserializer as _;
use serde::de::{SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::format::Compression;
use super::raw::{Raw, Sink, Unread};

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
    let is_list = text.trim_ascii_start().first() == Some(&b'[');
    if !is_list {
        return lines(bytes, sink);
    }
    let mark = first.len() - text.len();
    bytes.consume(mark);
    let mut entries = Entries { sink, number: 0, stopped: false };
    let mut reader = serde_json::Deserializer::from_reader(bytes);
    let read = reader.deserialize_seq(&mut entries);
    match read {
        _ if entries.stopped => Ok(()),
        Ok(()) => Ok(reader.end()?),
        Err(error) => Err(error.into()),
    }
}

/// Takes the entries of a list one by one, so that it is never held whole.
struct Entries<'s, 'r> {
    sink: &'s mut Sink<'r>,
    number: usize,
    stopped: bool,
}

impl<'de> Visitor<'de> for &mut Entries<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of JSON objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(fields) = list.next_element::<Map<String, Value>>()? {
            self.number += 1;
            if (self.sink)(Raw::row(self.number, fields)).is_break() {
                self.stopped = true;
                return Ok(());
            }
        }
        Ok(())
    }
}
