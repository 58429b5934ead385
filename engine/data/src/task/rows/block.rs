//! Consecutive rows of a file that have been checked: where they are, or their text, compressed.

use crate::task::error::Unit;

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
