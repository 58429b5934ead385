//! The blocks of one sequence.

use super::block_pool::{BlockId, ContentId};
use super::prefix_index::PrefixIndex;
use firebrick_spec::BLOCK_SIZE;
use std::ops::Range;

/// The blocks of one sequence in every group of layers (vLLM's block table). Made, changed and freed by its
/// [`KvCache`](super::KvCache).
#[derive(Debug)]
pub struct BlockTable {
    pub(super) tokens: usize,
    pub(super) groups: Vec<GroupTable>,
    /// Leading blocks that others can find by their content, and the content of the last.
    pub(super) known: (usize, ContentId),
    /// The slot of its states, with linear attention.
    pub(super) state: Option<u32>,
}

/// The blocks of one sequence in one group of layers.
#[derive(Clone, Debug, Default)]
pub(super) struct GroupTable {
    /// Index in the sequence of the first block that it still has: those before are outside of the sliding window.
    pub first: usize,
    /// The blocks from there on, oldest first.
    pub blocks: Vec<BlockId>,
    /// Leading blocks of the sequence that were shared once; blocks after them are its own.
    pub shared: usize,
}

impl BlockTable {
    pub(super) fn new(groups: usize) -> Self {
        Self { tokens: 0, groups: vec![GroupTable::default(); groups], known: (0, PrefixIndex::ROOT), state: None }
    }

    /// Tokens that there are blocks for.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Slots of the last block, in a group that is not behind a window, that hold no token.
    pub fn unused_slots(&self) -> usize {
        self.tokens.next_multiple_of(BLOCK_SIZE) - self.tokens
    }
}

impl GroupTable {
    /// Index in the sequence after its last block.
    pub fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// The block of index `index` in the sequence.
    pub fn block(&self, index: usize) -> BlockId {
        self.blocks[index - self.first]
    }

    /// The slots of tokens, which it has blocks for.
    pub fn slots(&self, tokens: Range<usize>) -> impl Iterator<Item = u32> + '_ {
        tokens.map(|token| {
            let block = self.block(token / BLOCK_SIZE) as usize;
            (block * BLOCK_SIZE + token % BLOCK_SIZE) as u32
        })
    }
}
