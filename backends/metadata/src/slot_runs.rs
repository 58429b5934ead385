//! Block tables as the CPU's kernel reads them: as runs of neighbouring slots, made once per step.

use crate::sequence_blocks::{SequenceBlocks, SharedBlocks};
use firebrick_spec::BLOCK_SIZE;
use std::ops::Range;

/// Sequences of one task: their products with a shared prefix are computed together.
const MAX_MEMBERS: usize = 8;

/// Tokens whose keys or values are read at a time, and prefetched before.
const PIECE: usize = 2 * BLOCK_SIZE;

/// The sequences of a step.
#[derive(Clone, Debug, Default)]
pub struct SlotRuns {
    /// Neighbouring slots, of all prefixes and sequences.
    runs: Vec<Range<usize>>,
    sequences: Vec<Sequence>,
    parts: Vec<Part>,
    slots: usize,
    rows: usize,
    tokens: usize,
}

/// A sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    row: usize,
    last: usize,
    tokens: usize,
    runs: Range<usize>,
}

/// Sequences that begin with the same tokens, up to `MAX_MEMBERS` of them.
#[derive(Clone, Debug)]
pub struct Part {
    first: usize,
    tokens: usize,
    prefix: Range<usize>,
    members: Range<usize>,
    /// All parts with this prefix.
    whole: Range<usize>,
}

impl Sequence {
    /// Its row in the step's tensors.
    #[inline]
    pub fn row(&self) -> usize {
        self.row
    }

    /// The slot of its new token.
    #[inline]
    pub fn last(&self) -> usize {
        self.last
    }

    /// Tokens after the shared prefix.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl Part {
    /// The position of the first token of its sequences.
    #[inline]
    pub fn first(&self) -> usize {
        self.first
    }

    /// Tokens that its sequences share.
    #[inline]
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl SlotRuns {
    /// For a step of `rows` rows.
    ///
    /// # Panics
    /// If a row is outside the step or in two sequences, a sequence has too few blocks for its tokens or none, or
    /// another one reads the block that it writes its new token to.
    pub fn new(shared: &[SharedBlocks], rows: usize) -> Self {
        let mut runs = Self::default();
        for group in shared {
            runs.push(group);
        }
        let mut taken = vec![false; rows];
        for Sequence { row, .. } in &runs.sequences {
            let taken = taken.get_mut(*row);
            let twice = taken.is_none_or(|taken| std::mem::replace(taken, true));
            assert!(!twice, "row {row} is outside the step or in two sequences");
        }
        runs.rows = runs.sequences.iter().map(|s| s.row + 1).max().unwrap_or(0);
        runs.slots = runs.runs.iter().map(|run| run.end).max().unwrap_or(0);
        runs.tokens = runs.runs.iter().map(ExactSizeIterator::len).sum();
        runs.assert_writes_are_exclusive(shared);
        runs
    }

    /// Tasks write new tokens while others read: this is what makes it sound.
    fn assert_writes_are_exclusive(&self, shared: &[SharedBlocks]) {
        let mut written = vec![false; self.slots.div_ceil(BLOCK_SIZE)];
        for Sequence { last, .. } in &self.sequences {
            let twice = std::mem::replace(&mut written[last / BLOCK_SIZE], true);
            assert!(!twice, "two sequences write to one block");
        }
        let mut read = shared.iter().flat_map(|group| {
            let full = group.members.iter().flat_map(|member| &member.blocks[..(member.tokens - 1) / BLOCK_SIZE]);
            let prefix = if group.members.is_empty() { &[] } else { group.blocks.as_slice() };
            prefix.iter().chain(full)
        });
        assert!(!read.any(|&block| written[block as usize]), "a sequence writes to a block that another reads");
    }

    fn push(&mut self, SharedBlocks { first: blocks_before, blocks, members }: &SharedBlocks) {
        let position = blocks_before * BLOCK_SIZE;
        let tokens = blocks.len() * BLOCK_SIZE;
        if let [alone] = members.as_slice() {
            // nobody else reads the prefix
            let first = self.runs.len();
            self.extend(first, blocks, tokens);
            self.push_sequence(first, tokens, alone);
            self.push_parts(position, 0, 0..0, 1);
        } else if !members.is_empty() {
            let first = self.runs.len();
            self.extend(first, blocks, tokens);
            let prefix = first..self.runs.len();
            for member in members {
                self.push_sequence(self.runs.len(), 0, member);
            }
            self.push_parts(position, tokens, prefix, members.len());
        }
    }

    /// Adds a sequence whose runs begin at `first`, `before` tokens of them already there.
    fn push_sequence(&mut self, first: usize, before: usize, sequence: &SequenceBlocks) {
        let SequenceBlocks { row, ref blocks, tokens } = *sequence;
        assert!(0 < tokens && tokens <= blocks.len() * BLOCK_SIZE, "{tokens} tokens in {} blocks", blocks.len());
        self.extend(first, blocks, tokens);
        self.sequences.push(Sequence {
            row,
            last: blocks[(tokens - 1) / BLOCK_SIZE] as usize * BLOCK_SIZE + (tokens - 1) % BLOCK_SIZE,
            tokens: before + tokens,
            runs: first..self.runs.len(),
        });
    }

    /// Adds the runs of the first `tokens` tokens of blocks to those from `first` on.
    fn extend(&mut self, first: usize, blocks: &[u32], tokens: usize) {
        for (i, &block) in blocks.iter().take(tokens.div_ceil(BLOCK_SIZE)).enumerate() {
            let start = block as usize * BLOCK_SIZE;
            let end = start + (tokens - i * BLOCK_SIZE).min(BLOCK_SIZE);
            match self.runs[first..].last_mut() {
                Some(run) if run.end == start => run.end = end,
                _ => self.runs.push(start..end),
            }
        }
    }

    /// Divides the last `members` sequences, which share a prefix, into parts.
    fn push_parts(&mut self, first: usize, tokens: usize, prefix: Range<usize>, members: usize) {
        let end = self.sequences.len();
        let first_part = self.parts.len();
        let whole = first_part..first_part + members.div_ceil(MAX_MEMBERS);
        for start in (end - members..end).step_by(MAX_MEMBERS) {
            self.parts.push(Part {
                first,
                tokens,
                prefix: prefix.clone(),
                members: start..end.min(start + MAX_MEMBERS),
                whole: whole.clone(),
            });
        }
    }

    /// Slots that a pool has at least.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Rows that the step's tensors have at least.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens to read.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Tasks for a pool of `heads` heads.
    pub fn tasks(&self, heads: usize) -> usize {
        self.parts.len() * heads
    }

    /// The head and the sequences of a task. Those that read the same prefix follow each other, so that it stays in a
    /// core's cache.
    pub fn task(&self, heads: usize, index: usize) -> (usize, &Part) {
        let whole = &self.parts[index / heads].whole;
        let within = index - whole.start * heads;
        let part = whole.start + within % whole.len();
        (within / whole.len(), &self.parts[part])
    }

    /// The sequences of a part.
    pub fn members(&self, part: &Part) -> &[Sequence] {
        &self.sequences[part.members.clone()]
    }

    /// The slots of a part's prefix, without its first `hidden` tokens, in pieces of at most `PIECE`.
    #[inline]
    pub fn prefix(&self, part: &Part, hidden: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        pieces(hidden, &self.runs[part.prefix.clone()])
    }

    /// The slots of the blocks of a sequence's own tokens, without the first `hidden` tokens, which are whole blocks.
    /// The last block may have slots without tokens.
    #[inline]
    pub fn suffix_blocks(&self, sequence: &Sequence, hidden: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        let pieces = self.suffix(sequence, hidden);
        pieces.map(|piece| piece.start..piece.end.next_multiple_of(BLOCK_SIZE))
    }

    /// The slots of a sequence's own tokens, as those of a prefix.
    #[inline]
    pub fn suffix(&self, sequence: &Sequence, hidden: usize) -> impl Iterator<Item = Range<usize>> + Clone {
        pieces(hidden, &self.runs[sequence.runs.clone()])
    }
}

/// Runs without their first `hidden` slots, in pieces of at most [`PIECE`].
#[inline]
fn pieces(mut hidden: usize, runs: &[Range<usize>]) -> impl Iterator<Item = Range<usize>> + Clone {
    let seen = runs.iter().map(move |run| {
        let gone = hidden.min(run.len());
        hidden -= gone;
        run.start + gone..run.end
    });
    seen.flat_map(|run| {
        let starts = run.clone().step_by(PIECE);
        starts.map(move |start| start..run.end.min(start + PIECE))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(row: usize, blocks: &[u32], tokens: usize) -> SequenceBlocks {
        SequenceBlocks { row, blocks: blocks.to_vec(), tokens }
    }

    fn refused(shared: &[SharedBlocks]) -> bool {
        std::panic::catch_unwind(|| SlotRuns::new(shared, 2)).is_err()
    }

    #[test]
    fn tables_that_one_sequence_would_spoil_for_another_are_refused() {
        let two = |prefix: &[u32], a, b| {
            let shared = SharedBlocks { first: 0, blocks: prefix.to_vec(), members: vec![a, b] };
            refused(&[shared])
        };
        assert!(!two(&[3], member(0, &[1], 16), member(1, &[2], 1)));
        // blocks that are there in advance
        assert!(!two(&[3], member(0, &[1, 4], 16), member(1, &[2, 4], 1)));
        assert!(two(&[3], member(0, &[1], 16), member(1, &[1], 1)), "one last block");
        assert!(two(&[1], member(0, &[1], 16), member(1, &[2], 1)), "a prefix");
        assert!(two(&[3], member(0, &[1], 16), member(1, &[1, 2], 17)), "read by another");
        assert!(two(&[3], member(0, &[1], 16), member(0, &[2], 1)), "one row");
        assert!(two(&[3], member(0, &[1], 16), member(2, &[2], 1)), "a row outside");
        assert!(two(&[3], member(0, &[1], 17), member(1, &[2], 1)), "too few blocks");
        assert!(two(&[3], member(0, &[1], 0), member(1, &[2], 1)), "no token");
    }
}
