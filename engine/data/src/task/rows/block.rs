//! Consecutive checked rows of a file: their positions or their compressed text.

use crate::task::error::Unit;

/// Consecutive rows of a file.
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
