//! The part of a micro-batch's rows that each of several ranks has (Ulysses sequence parallelism, arXiv:2309.14509).

use super::Run;
use burn::tensor::{Device, Tensor, TensorData};
use firebrick_core::sequence::{Sequence, TokenColumns};
use firebrick_objectives::TokenInputs;
use std::ops::Range;

/// One of the ranks that share a micro-batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The rank among them, from 0.
    pub rank: usize,
    /// Number of ranks, at least 1.
    pub ranks: usize,
}

impl Part {
    /// One rank that has all rows.
    pub const ALL: Self = Self { rank: 0, ranks: 1 };

    /// True if others have rows too.
    pub fn is_one_of_several(self) -> bool {
        self.ranks > 1
    }

    /// Its part of `rows` rows, which are padded to a multiple of the ranks: at least one if there is any.
    pub fn rows(self, rows: usize) -> Range<usize> {
        let each = rows.div_ceil(self.ranks);
        self.rank * each..(self.rank + 1) * each
    }
}

/// The micro-batch of all ranks that share its sequences, for losses over whole sequences.
#[derive(Debug)]
pub struct Whole {
    /// Columns of all scored tokens for the losses.
    pub inputs: TokenInputs,
    /// Scored tokens that lie on earlier ranks.
    pub before: usize,
}

impl Whole {
    pub(super) fn new(sequences: &[&Sequence], before: usize, device: &Device) -> Self {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
        Self { inputs: inputs(sequences, 0..lengths.iter().sum(), &lengths, device), before }
    }

    /// Scored tokens of all ranks.
    pub fn scored(&self) -> usize {
        self.inputs.lengths.iter().sum()
    }

    /// Sequences that have any.
    pub fn sequences(&self) -> usize {
        self.inputs.lengths.iter().filter(|&&n| n > 0).count()
    }

    /// Sequences whose first scored token lies on a rank that has so many scored tokens of each.
    pub(super) fn begun(&self, lengths: &[usize]) -> usize {
        let mut first = 0;
        let end = self.before + lengths.iter().sum::<usize>();
        let begins = |&length: &usize| {
            let begins = length > 0 && (self.before..end).contains(&first);
            first += length;
            begins
        };
        self.inputs.lengths.iter().map(begins).filter(|&b| b).count()
    }
}

/// The columns of some of the sequences' scored tokens, on the device; `lengths` of each sequence.
pub(super) fn inputs(sequences: &[&Sequence], which: Range<usize>, lengths: &[usize], device: &Device) -> TokenInputs {
    let scored: Vec<usize> = sequences.iter().map(|s| s.positions.len()).collect();
    let columns: Vec<_> = sequences.iter().map(|s| &s.columns).collect();
    let columns = TokenColumns::concat(&columns, &scored);
    TokenInputs {
        columns: columns.map(|values| {
            let values = values[which.clone()].to_vec();
            Tensor::<1>::from_data(TensorData::new(values, [which.len()]), device)
        }),
        lengths: lengths.to_vec(),
    }
}

/// The rows of each sequence, counted from its first, that lie in a part of all rows; each has so many.
pub(super) fn spans(part: &Range<usize>, strides: &[usize]) -> Vec<Range<usize>> {
    let mut start = 0;
    let each = strides.iter().map(|&stride| {
        let span = part.start.clamp(start, start + stride)..part.end.clamp(start, start + stride);
        let span = span.start - start..span.end - start;
        start += stride;
        span
    });
    each.collect()
}

/// Scored tokens in rows before one.
pub(super) fn scored_before(sequences: &[&Sequence], runs: &[Run], row: usize) -> usize {
    let mut start = 0;
    let mut scored = 0;
    for run in runs {
        if !run.is_shared() {
            let positions = &sequences[run.sequence].positions;
            scored += positions.partition_point(|p| start + p - run.first < row);
        }
        start += run.rows;
    }
    scored
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fewer_rows_than_ranks_are_a_row_each() {
        let rows = |rank| Part { rank, ranks: 4 }.rows(2);
        assert_eq!([0, 1, 2, 3].map(rows), [0..1, 1..2, 2..3, 3..4]);
        assert_eq!(Part::ALL.rows(5), 0..5);
    }

    proptest! {
        #[test]
        fn every_row_and_every_scored_token_is_on_one_rank(
            lengths in prop::collection::vec(1_usize..9, 1..6),
            ranks in 1_usize..6,
            seed in any::<u64>(),
        ) {
            let sequences: Vec<Sequence> = lengths
                .iter()
                .enumerate()
                .map(|(i, &n)| Sequence {
                    tokens: vec![0; n],
                    positions: (0..n).filter(|p| seed >> (7 * i + p) & 1 == 1).collect(),
                    ..Sequence::default()
                })
                .collect();
            let sequences: Vec<&Sequence> = sequences.iter().collect();
            let runs = crate::batch::runs(&sequences, firebrick_plan::Layout::Packed);
            let (mut rows, mut scored) = (vec![0; lengths.len()], 0);
            for rank in 0..ranks {
                let here = Part { rank, ranks }.rows(lengths.iter().sum());
                prop_assert_eq!(scored_before(&sequences, &runs, here.start), scored);
                for (i, span) in spans(&here, &lengths).into_iter().enumerate() {
                    if !span.is_empty() {
                        prop_assert_eq!(span.start, rows[i]);
                        rows[i] = span.end;
                    }
                    let positions = sequences[i].positions.iter().filter(|p| span.contains(p));
                    scored += positions.count();
                }
            }
            prop_assert_eq!(rows, lengths);
            prop_assert_eq!(scored, sequences.iter().map(|s| s.positions.len()).sum::<usize>());
        }
    }
}
