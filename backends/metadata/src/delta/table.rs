//! The sequences of a forward pass as GPU kernels take them.

use super::{CHUNK, CHUNK_FIELDS, Generations, MAX_TAPS, READER_FIELDS, SEQUENCE_FIELDS, StateRows};
use crate::shapes::int_tensor;
use burn::tensor::{Device, Int, Tensor};
use std::ops::Range;

/// The table of GPU kernels: sequences, generation by generation, then their chunks, then all rows that are in a
/// sequence, then the rows of descendants that convolutions reach ([`Generations::readers`]).
///
/// - A sequence has its first row, the row after its last, its slot, whether it begins, and its first chunk; its parent,
///   and its place among sequences that have children, each plus 1, or 0; its first child, and how many it has; where
///   its readers begin in the table, and where they end.
/// - A chunk has its first row, the row after its last, and its sequence.
/// - A reader has its offset, its row and its sequence.
#[derive(Clone, Debug)]
pub struct SequenceTable {
    /// The table, i32.
    pub words: Tensor<1, Int>,
    /// Number of sequences.
    pub sequences: usize,
    /// Number of chunks.
    pub chunks: usize,
    /// Rows that are in a sequence.
    pub rows: usize,
    /// The sequences of each generation.
    pub generations: Vec<Range<usize>>,
    /// Sequences that have children, and those that have a parent.
    pub handed: [usize; 2],
}

impl SequenceTable {
    pub(super) fn new(sequences: &[StateRows], generations: &Generations, device: &Device) -> Self {
        let order = generations.members.concat();
        let mut places = vec![0; order.len()];
        for (place, &i) in order.iter().enumerate() {
            places[i] = place;
        }
        let rows_of = |i: usize| sequences[i].rows.clone();
        let (mut spans, mut chunks, mut readers) = (Vec::new(), Vec::new(), Vec::new());
        let all_chunks: usize = sequences.iter().map(|sequence| sequence.rows.len().div_ceil(CHUNK)).sum();
        let all_rows: usize = sequences.iter().map(|sequence| sequence.rows.len()).sum();
        let readers_at = order.len() * SEQUENCE_FIELDS + all_chunks * CHUNK_FIELDS + all_rows;
        for (place, &i) in order.iter().enumerate() {
            let StateRows { rows, slot, begins } = &sequences[i];
            let one_more = |index: Option<usize>| index.map_or(0, |index| index + 1);
            let children = &generations.children[i];
            let first_reader = readers_at + readers.len();
            for reader in generations.readers(rows_of, i, MAX_TAPS - 1) {
                readers.extend([reader.offset, reader.row, places[reader.sequence]]);
            }
            let span: [usize; SEQUENCE_FIELDS] = [
                rows.start,
                rows.end,
                *slot,
                usize::from(*begins),
                chunks.len() / CHUNK_FIELDS,
                one_more(generations.parents[i].map(|parent| places[parent])),
                one_more(generations.ends[i]),
                children.first().map_or(0, |&child| places[child]),
                children.len(),
                first_reader,
                readers_at + readers.len(),
            ];
            spans.extend(span);
            for first in rows.clone().step_by(CHUNK) {
                chunks.extend([first, (first + CHUNK).min(rows.end), place]);
            }
        }
        debug_assert!(readers.len().is_multiple_of(READER_FIELDS));
        let rows = order.iter().flat_map(|&i| rows_of(i)).collect();
        let words = [spans, chunks, rows, readers].concat();
        let mut words: Vec<i32> = words.into_iter().map(|word| word as i32).collect();
        // a buffer of nothing cannot be bound
        words.resize(words.len().max(1), 0);
        let mut first = 0;
        let generations_of = generations.members.iter().map(|members| {
            first += members.len();
            first - members.len()..first
        });
        Self {
            words: int_tensor(words, &device.clone().inner()),
            sequences: order.len(),
            chunks: all_chunks,
            rows: all_rows,
            generations: generations_of.collect(),
            handed: generations.handed(),
        }
    }

    /// The offset of chunks in the table.
    pub fn chunks_at(&self) -> usize {
        self.sequences * SEQUENCE_FIELDS
    }

    /// The offset of rows in the table.
    pub fn rows_at(&self) -> usize {
        self.chunks_at() + self.chunks * CHUNK_FIELDS
    }
}
