//! Reads files into blocks of rows: one thread reads, all cores parse, check and compress a bounded number of rows at a
//! time.

use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_backends::device::panic_message;
use firebrick_spec::heartbeat::beat;
use firebrick_spec::json;
use rayon::prelude::*;
use serde_json::Value;

use super::format::{self, Compression, FIRST_BYTES, Layout, format_of};
use super::raw::{ROW_LIMIT, Raw, RawContent, Sink, TOO_MUCH, Unread, expanded};
use super::{arrow, csv, parquet, text};
use crate::task::error::{RowLocation, Unit};
use crate::task::template::Row;
use crate::task::{Fields, TaskError};

/// Most rows of a block.
const BLOCK_ROWS: usize = 256;
/// Bytes of a block's text after which it takes no more rows.
const BLOCK_BYTES: usize = 128 << 10;

/// Bytes of rows that are sent at a time.
const BATCH_BYTES: usize = 8 << 20;

/// Consecutive checked rows of a file.
pub(super) struct Block {
    /// The line or row of each in its file.
    pub numbers: Vec<u32>,
    pub unit: Unit,
    pub content: Content,
}

/// Content of a block.
pub(super) enum Content {
    /// Start of each after the first one's offset, and its length.
    Placed { offset: u64, spans: Vec<(u32, u32)> },
    /// Their JSON, one per line, compressed, and its uncompressed length.
    Packed { bytes: Box<[u8]>, len: usize },
}

/// Check of a row, called once per row, on any thread.
pub(crate) type Check<'a> = dyn Fn(Row) -> Result<(), TaskError> + Sync + 'a;

/// Compression level of zstd: a core compresses hundreds of megabytes per second.
const COMPRESSION_LEVEL: i32 = 3;

/// Rows of the reading thread, or the number of rows before an error, with its reason.
type Message = Result<Vec<Vec<Raw>>, (usize, Unread)>;

/// Reads at most `limit` rows of a file into blocks, each row checked. Returns the first error by row.
pub(super) fn read_blocks(path: &Path, limit: u64, check: &Check<'_>) -> Result<Vec<Block>, TaskError> {
    // few enough to take little memory, enough for every core
    let at_a_time = (rayon::current_num_threads() * 4).max(8);
    let (sender, receiver) = sync_channel(1);
    std::thread::scope(|scope| {
        scope.spawn(move || send(path, limit, at_a_time, &sender));
        let mut blocks = Vec::new();
        for message in receiver {
            let rows = message.map_err(|(rows, why)| match why {
                Unread::Damaged(detail) => TaskError::Damaged { path: path.to_owned(), rows, detail },
                Unread::Refused(detail) => TaskError::Unsupported { path: path.to_owned(), detail },
            })?;
            let parsed: Vec<Result<Block, TaskError>> =
                rows.into_par_iter().map(|rows| block(rows, path, check)).collect();
            for block in parsed {
                blocks.push(block?);
            }
        }
        Ok(blocks)
    })
}

/// The reading thread: collects rows and sends them, until the file ends, the limit is reached or the receiver is
/// gone.
fn send(path: &Path, limit: u64, at_a_time: usize, sender: &SyncSender<Message>) {
    let mut batch = Batch::default();
    let mut left = limit;
    let size = path.metadata().map_or(0, |about| about.len());
    let most = expanded(size);
    let mut total = 0;
    let mut sink = |raw: Raw| {
        if left == 0 || total > most {
            return ControlFlow::Break(());
        }
        left -= 1;
        total += raw.bytes() as u64;
        batch.push(raw);
        if batch.blocks.len() > at_a_time || batch.held > BATCH_BYTES {
            // the last one is incomplete
            let begun = batch.blocks.pop();
            beat();
            let full = std::mem::replace(&mut batch.blocks, begun.into_iter().collect());
            batch.held = batch.bytes;
            if sender.send(Ok(full)).is_err() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    };
    // the readers of binary files panic on some damaged files
    let work = || catch_unwind(AssertUnwindSafe(|| read(path, &mut sink)));
    let read = limited(reader_limit(size), &format!("reading {}", path.display()), work);
    let mut read = read.unwrap_or_else(|panic| Err(Unread::Damaged(panic_message(panic.as_ref()))));
    if total > most {
        read = Err(Unread::Refused(TOO_MUCH.into()));
    }
    // a receiver that is gone has its own error
    let _ = sender.send(Ok(std::mem::take(&mut batch.blocks)));
    if let Err(why) = read {
        let _ = sender.send(Err((batch.rows, why)));
    }
}

/// Limit of a reader's allocations for a file of `size` bytes: of pages, batches and what headers claim.
fn reader_limit(size: u64) -> AllocationLimit {
    let page = usize::try_from(size.saturating_mul(20)).unwrap_or(usize::MAX);
    AllocationLimit::largest(page.clamp(96 << 20, 2 << 30))
}

/// Sends every row of a file to `sink`.
fn read(path: &Path, sink: &mut Sink<'_>) -> Result<(), Unread> {
    let mut first = Vec::new();
    File::open(path)?.take(FIRST_BYTES as u64).read_to_end(&mut first)?;
    format::check(path, &first)?;
    let (layout, compression) = format_of(path);
    match layout {
        Layout::Parquet => parquet::rows(path, sink),
        Layout::Arrow => arrow::rows(path, sink),
        Layout::Csv(separator) => csv::rows(path, compression, separator, sink),
        Layout::List => text::list(text::open(path, compression)?, sink),
        Layout::Lines => text::lines(text::open(path, compression)?, sink),
    }
}

/// Rows before they become blocks.
#[derive(Default)]
struct Batch {
    blocks: Vec<Vec<Raw>>,
    /// Bytes of the last one.
    bytes: usize,
    /// Bytes of all.
    held: usize,
    rows: usize,
}

impl Batch {
    fn push(&mut self, raw: Raw) {
        self.rows += 1;
        let bytes = raw.bytes();
        self.held += bytes;
        match self.blocks.last_mut() {
            Some(last) if last.len() < BLOCK_ROWS && self.bytes + bytes <= BLOCK_BYTES => {
                self.bytes += bytes;
                last.push(raw);
            }
            _ => {
                self.bytes = bytes;
                self.blocks.push(vec![raw]);
            }
        }
    }
}

/// Parses and checks the rows of a block, and keeps their positions, or their text if they cannot be read again.
fn block(rows: Vec<Raw>, path: &Path, check: &Check<'_>) -> Result<Block, TaskError> {
    let is_rereadable = matches!(format_of(path), (Layout::Lines, Compression::None));
    let numbers: Vec<u32> = rows.iter().map(|row| row.number as u32).collect();
    let (mut spans, mut text): (Vec<(u64, u32)>, Vec<u8>) = (Vec::new(), Vec::new());
    let mut unit = Unit::Line;
    for raw in rows {
        let place = raw.place(path);
        unit = place.unit;
        let fields = match raw.content {
            RawContent::Text { offset, text: line } => {
                let fields = parse(&line, &place)?;
                spans.push((offset, line.len() as u32));
                match line.trim_ascii() {
                    _ if is_rereadable => {}
                    // an entry of a list may be of several lines
                    json if json.contains(&b'\n') => text.extend(fields.to_text().bytes()),
                    json => text.extend(json),
                }
                fields
            }
            RawContent::Fields(fields) => {
                let fields = Fields::from(fields);
                text.extend(fields.to_text().bytes());
                fields
            }
        };
        text.push(b'\n');
        check(Row { place, fields })?;
    }
    let content = if is_rereadable {
        let offset = spans.first().map_or(0, |(offset, _)| *offset);
        Content::Placed { offset, spans: spans.into_iter().map(|(at, len)| ((at - offset) as u32, len)).collect() }
    } else {
        let bytes = zstd::bulk::compress(&text, COMPRESSION_LEVEL).map_err(|error| TaskError::Damaged {
            path: path.to_owned(),
            rows: 0,
            detail: error.to_string(),
        })?;
        Content::Packed { bytes: bytes.into_boxed_slice(), len: text.len() }
    };
    Ok(Block { numbers, unit, content })
}

/// One line as fields.
pub(super) fn parse(line: &[u8], place: &RowLocation) -> Result<Fields, TaskError> {
    // without the line break, so that an early end is on this line
    let read = || json::parse(line.trim_ascii_end());
    let found = match limited(ROW_LIMIT, &format!("reading {place}"), read) {
        Ok(Value::Object(fields)) => return Ok(fields.into()),
        Ok(Value::Array(_)) if place.unit == Unit::Line => {
            "a list; a file that is one JSON list has to be called .json".to_owned()
        }
        Ok(value) => format!("the value {}", json::to_text(&value)),
        // the first line of a list or an object of several lines
        Err(fault) if fault.reason.starts_with("EOF") && matches!(line.trim_ascii(), b"[" | b"{") => {
            "the beginning of a JSON list or object; a file that is one JSON list has to be called .json, and any other \
             has one object per line"
                .to_owned()
        }
        Err(fault) => format!("invalid JSON at column {} ({})", fault.column, fault.reason),
    };
    let place = place.clone();
    Err(TaskError::NotARow { place, found })
}
