//! Consecutive rows of a file that have been checked: where they are, or their text, compressed.

use crate::task::error::Unit;

/// How hard a block is compressed: a level that a core does at hundreds of megabytes a second.
const LEVEL: i32 = 3;

/// Consecutive rows of a file.
pub(super) struct Block {
    /// The line or row of each in its file.
    pub numbers: Vec<u32>,
    pub unit: Unit,
    pub content: Content,
}

/// What is kept of them.
pub(super) enum Content {
    /// Where each begins after the first one's offset, and its length.
    Placed { offset: u64, spans: Vec<(u32, u32)> },
    /// Their JSON, one a line, compressed, and how long it is otherwise.
    Packed { bytes: Box<[u8]>, len: usize },
}

/// A block of rows that are read again from their file.
pub(super) fn placed(numbers: Vec<u32>, unit: Unit, spans: &[(u64, u32)]) -> Block {
    let offset = spans.first().map_or(0, |(offset, _)| *offset);
    let content =
        Content::Placed { offset, spans: spans.iter().map(|(at, len)| ((at - offset) as u32, *len)).collect() };
    Block { numbers, unit, content }
}

/// A block of rows that are held.
pub(super) fn packed(numbers: Vec<u32>, unit: Unit, text: &[u8]) -> std::io::Result<Block> {
    let content = Content::Packed { bytes: zstd::bulk::compress(text, LEVEL)?.into_boxed_slice(), len: text.len() };
    Ok(Block { numbers, unit, content })
}
