//! Blocks of queries, the rows of the keys that they see, and their probabilities.

use crate::cpu::prelude::*;
use crate::cpu::softmax::{Scores, softmax};
use crate::prefix_groups::PrefixTree;
use crate::shapes::AttentionShape;

/// Queries of a block.
const BLOCK: usize = 64;

/// The layout of heads in rows of queries and of keys.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    pub(super) query: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
}

impl Heads {
    pub(super) fn new(q: &FlexTensor, k: &FlexTensor) -> Self {
        let ([_, heads, dim], [_, kv, _]) = (dims(q), dims(k));
        Self { query: heads, kv, dim }
    }

    pub(super) fn group(self) -> usize {
        self.query / self.kv
    }

    pub(super) fn q_row(self) -> usize {
        self.query * self.dim
    }

    pub(super) fn kv_row(self) -> usize {
        self.kv * self.dim
    }

    /// Offset of a head in a row of queries.
    pub(super) fn query(self, row: usize, head: usize) -> usize {
        row * self.q_row() + head * self.dim
    }

    /// Offset of a key head in a row of keys.
    pub(super) fn key(self, row: usize, kv: usize) -> usize {
        row * self.kv_row() + kv * self.dim
    }
}

/// The rows of a run and of the path to it, whose tokens are numbered from the root.
#[derive(Clone, Debug)]
pub(super) struct Rows {
    /// The first token and the rows of each run of the path; the last is the run itself.
    path: Vec<(usize, Range<usize>)>,
}

impl Rows {
    fn suffix(&self) -> (usize, Range<usize>) {
        self.path.last().cloned().unwrap_or_default()
    }

    /// The row of a token of the run itself.
    pub(super) fn suffix_row(&self, token: usize) -> usize {
        let (first, rows) = self.suffix();
        rows.start + token - first
    }

    /// Tokens as runs of consecutive rows: each run's tokens and its first row.
    pub(super) fn runs(&self, tokens: &Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let within = move |(first, rows): &(usize, Range<usize>)| {
            let part = tokens.start.max(*first)..tokens.end.min(first + rows.len());
            (!part.is_empty()).then(|| (part.clone(), rows.start + part.start - first))
        };
        self.path.iter().filter_map(within)
    }

    /// Blocks of the run's queries.
    pub(super) fn blocks(&self, window: Option<usize>) -> impl Iterator<Item = Block> + use<> {
        let (first, rows) = self.suffix();
        let end = first + rows.len();
        let root = self.path.first().map_or(0, |(first, _)| *first);
        (first..end).step_by(BLOCK).map(move |start| {
            let end = (start + BLOCK).min(end);
            let oldest = window.map_or(root, |w| root.max((start + 1).saturating_sub(w)));
            Block { queries: start..end, keys: oldest - oldest % LANES..end }
        })
    }
}

impl Rows {
    /// Every run of queries after its path.
    pub(super) fn of_tree(tree: &PrefixTree) -> impl Iterator<Item = Self> {
        assert!(tree.first().is_multiple_of(LANES), "sums are of whole vectors");
        let paths = tree.paths().into_iter().skip(usize::from(tree.is_continued()));
        paths.map(|path| {
            let mut token = tree.first();
            let numbered = path.into_iter().map(|run| {
                let rows = tree.runs()[run].rows.clone();
                token += rows.len();
                (token - rows.len(), rows)
            });
            Self { path: numbered.collect() }
        })
    }
}

/// A block of queries and the keys that any of them sees, as tokens of their sequence; from a multiple of [`LANES`] on.
#[derive(Clone)]
pub(super) struct Block {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Block {
    /// Numbers of a row of scores: whole vectors.
    pub(super) fn width(&self) -> usize {
        self.keys.len().next_multiple_of(LANES)
    }
}

/// Turns the scores of a block into probabilities, row by row, in place; masked keys get 0, and so does what is behind
/// the last key. Where a sink takes part, its share of each row is written to `shares`.
#[inline(always)]
pub(super) fn probabilities<T: Real>(
    scores: &mut [T],
    block: &Block,
    shape: &AttentionShape,
    sink: Option<T>,
    shares: &mut Vec<T>,
) {
    let scores_of = Scores { scale: shape.scale, softcap: shape.softcap };
    shares.clear();
    for (query, row) in block.queries.clone().zip(scores.chunks_exact_mut(block.width())) {
        let oldest = shape.window.map_or(0, |w| (query + 1).saturating_sub(w));
        let seen = oldest.saturating_sub(block.keys.start)..query + 1 - block.keys.start;
        let (row, rest) = row.split_at_mut(seen.end.next_multiple_of(LANES));
        rest.fill(T::ZERO);
        shares.extend(softmax(row, &seen, scores_of, sink));
    }
}
