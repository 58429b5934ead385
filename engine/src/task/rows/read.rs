//! From a file to blocks of rows: one thread reads, all cores parse, check and compress, a bounded number of rows at a
//! time.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::mpsc::{SyncSender, sync_channel};

use rayon::prelude::*;
use serde_json::{Map, Value};

use super::block::{Block, packed, placed};
use super::format::{Compression, Layout, format_of};
use super::raw::{Raw, RawContent, Unread};
use super::{parquet, text};
use crate::task::TaskError;
use crate::task::error::{RowLocation, Unit};
use crate::task::template::Row;

/// Most rows of a block.
const BLOCK_ROWS: usize = 256;
/// Bytes of a block's text after which it takes no more rows.
const BLOCK_BYTES: usize = 128 << 10;

/// What a row's check is: called once for every row, on any thread.
pub(crate) type Check<'a> = dyn Fn(Row) -> Result<(), TaskError> + Sync + 'a;

/// What the reading thread sends.
enum Message {
    Rows(Vec<Vec<Raw>>),
    /// The file cannot be read on after so many rows.
    Broken {
        rows: usize,
        why: Unread,
    },
}

/// Reads at most `limit` rows of a file into blocks, each row checked. The first error by row is the one that is given.
pub(super) fn blocks(path: &Path, limit: u64, check: &Check<'_>) -> Result<Vec<Block>, TaskError> {
    // few enough that rows on their way take little memory, enough that every core has some
    let at_a_time = (rayon::current_num_threads() * 4).max(8);
    let (sender, receiver) = sync_channel(1);
    std::thread::scope(|scope| {
        scope.spawn(move || send(path, limit, at_a_time, &sender));
        let mut blocks = Vec::new();
        for message in receiver {
            let rows = match message {
                Message::Rows(rows) => rows,
                Message::Broken { rows, why } => {
                    return Err(TaskError::Damaged { path: path.to_owned(), rows, detail: why.0 });
                }
            };
            let done: Vec<Result<Block, TaskError>> =
                rows.into_par_iter().map(|rows| block(rows, path, check)).collect();
            for one in done {
                blocks.push(one?);
            }
        }
        Ok(blocks)
    })
}

/// The reading thread: gathers rows and sends them, until the file ends, the limit is reached or nobody listens any
/// more.
fn send(path: &Path, limit: u64, at_a_time: usize, sender: &SyncSender<Message>) {
    let mut gathered = Gathered::default();
    let mut left = limit;
    let mut sink = |raw: Raw| {
        if left == 0 {
            return ControlFlow::Break(());
        }
        left -= 1;
        gathered.push(raw);
        if gathered.blocks.len() > at_a_time {
            // the last one has only begun
            let begun = gathered.blocks.split_off(at_a_time);
            let full = std::mem::replace(&mut gathered.blocks, begun);
            if sender.send(Message::Rows(full)).is_err() {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    };
    let (layout, compression) = format_of(path);
    let read = match (layout, compression) {
        (Layout::Parquet, Compression::None) => parquet::rows(path, &mut sink),
        (Layout::Parquet, _) => {
            Err(Unread("a Parquet file cannot be read through a compression; decompress it".to_owned()))
        }
        (Layout::List, _) => text::open(path, compression).and_then(|b| text::list(b, &mut sink)),
        (Layout::Lines, _) => text::open(path, compression).and_then(|b| text::lines(b, &mut sink)),
    };
    // whoever hung up has an error of their own
    let _ = sender.send(Message::Rows(std::mem::take(&mut gathered.blocks)));
    if let Err(why) = read {
        let rows = gathered.rows;
        let _ = sender.send(Message::Broken { rows, why });
    }
}

/// Rows on their way to being blocks.
#[derive(Default)]
struct Gathered {
    blocks: Vec<Vec<Raw>>,
    /// Bytes of the last one.
    bytes: usize,
    rows: usize,
}

impl Gathered {
    fn push(&mut self, raw: Raw) {
        self.rows += 1;
        let bytes = raw.bytes();
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

/// Parses and checks the rows of a block, and keeps where they are or, where that cannot be found again, what they say.
fn block(rows: Vec<Raw>, path: &Path, check: &Check<'_>) -> Result<Block, TaskError> {
    let stays = matches!(format_of(path), (Layout::Lines, Compression::None));
    let numbers: Vec<u32> = rows.iter().map(|row| row.number as u32).collect();
    let (mut spans, mut text) = (Vec::new(), Vec::new());
    let mut unit = Unit::Line;
    for raw in rows {
        let place = raw.place(path);
        unit = place.unit;
        let fields = match raw.content {
            RawContent::Line { offset, text: line } => {
                let fields = parse(&line, &place)?;
                spans.push((offset, line.len() as u32));
                if !stays {
                    text.extend(line.trim_ascii());
                }
                fields
            }
            RawContent::Fields(fields) => {
                let line = serde_json::to_vec(&fields);
                text.extend(line.map_err(|e| TaskError::NotARow { place: place.clone(), found: e.to_string() })?);
                fields
            }
        };
        text.push(b'\n');
        check(Row { place, fields })?;
    }
    if stays {
        return Ok(placed(numbers, unit, &spans));
    }
    packed(numbers, unit, &text).map_err(|error| TaskError::Damaged {
        path: path.to_owned(),
        rows: 0,
        detail: error.to_string(),
    })
}

/// One line as fields.
pub(super) fn parse(line: &[u8], place: &RowLocation) -> Result<Map<String, Value>, TaskError> {
    // without the line break, so that an end that comes too early is on this line
    let found = match serde_json::from_slice(line.trim_ascii_end()) {
        Ok(Value::Object(fields)) => return Ok(fields),
        Ok(Value::Array(_)) => "a list; a file that is one JSON list has to be called .json".to_owned(),
        Ok(value) => format!("the value {value}"),
        Err(error) => format!("invalid JSON at column {} ({})", error.column(), kind(&error)),
    };
    let place = place.clone();
    Err(TaskError::NotARow { place, found })
}

/// What the JSON reader said, without its own `line 1`: the line is that of the file.
fn kind(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let said = text.split(" at line ").next();
    said.unwrap_or_default().to_owned()
}
