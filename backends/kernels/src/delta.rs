//! Sequences and heads of gated `DeltaNet` layers.

mod gathers;

pub(super) use gathers::{PaddedRows, TapRows};

use crate::shapes::int_tensor;
use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use firebrick_device::device::is_cpu;
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

/// Tokens of a chunk on GPUs, and in tensor operations.
pub(super) const CHUNK: usize = 64;

/// Fields of a sequence and of a chunk in their table.
pub(super) const SEQUENCE_FIELDS: usize = 5;
pub(super) const CHUNK_FIELDS: usize = 4;

/// The rows of one sequence in a forward pass, one behind the other, and the state that they begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRows {
    /// Rows of the forward pass.
    pub rows: Range<usize>,
    /// Slot of its state in a pool; not read in a forward pass without one.
    pub slot: usize,
    /// True if the sequence begins here, with a state of zeros.
    pub begins: bool,
}

/// The rows of all sequences of a forward pass. No row is in two; rows in none get zeros. Made once, used by every
/// layer.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    sequences: Arc<[StateRows]>,
    /// Their table for GPU kernels.
    pub(super) table: Option<SequenceTable>,
    device: Device,
    /// Indices of tensor operations, made where they are needed first.
    gathers: Arc<Gathers>,
}

#[derive(Debug, Default)]
struct Gathers {
    taps: OnceLock<TapRows>,
    padded: OnceLock<PaddedRows>,
    slots: OnceLock<Tensor<1, Int>>,
}

impl SequenceRows {
    /// Prepares sequences for a device. Those without rows are left out.
    pub fn new(sequences: Vec<StateRows>, device: &Device) -> Self {
        let sequences = sequences.into_iter().filter(|sequence| !sequence.rows.is_empty());
        let sequences: Arc<[StateRows]> = sequences.collect();
        let table = (!is_cpu(device)).then(|| SequenceTable::new(&sequences, device));
        Self { sequences, table, device: device.clone(), gathers: Arc::default() }
    }

    /// Whole sequences that begin with the forward pass.
    pub fn whole(sequences: impl Iterator<Item = Range<usize>>, device: &Device) -> Self {
        Self::new(sequences.map(|rows| StateRows { rows, slot: 0, begins: true }).collect(), device)
    }

    /// The inputs of a convolution among `rows` rows.
    pub(super) fn tap_rows(&self, rows: usize, taps: usize) -> &TapRows {
        self.gathers.taps.get_or_init(|| TapRows::new(self, rows, taps, &self.device))
    }

    /// The sequences in rows of one length.
    pub(super) fn padded_rows(&self, rows: usize) -> &PaddedRows {
        self.gathers.padded.get_or_init(|| PaddedRows::new(self, rows, &self.device))
    }

    fn slots(&self) -> Tensor<1, Int> {
        let slots = || gathers::integers(self.iter().map(|sequence| sequence.slot), &self.device);
        self.gathers.slots.get_or_init(slots).clone()
    }

    /// The states of the sequences in a pool, `[sequences, numbers]`, zeros where they begin.
    pub(super) fn read(&self, pool: &Tensor<2>) -> Tensor<2> {
        let continues: Vec<f32> = self.iter().map(|sequence| if sequence.begins { 0.0 } else { 1.0 }).collect();
        let continues = TensorData::new(continues, [self.len(), 1]);
        pool.clone().select(0, self.slots()) * Tensor::from_data(continues, (&pool.device(), pool.dtype()))
    }

    /// A pool with other states of the sequences.
    pub(super) fn write(&self, pool: Tensor<2>, states: Tensor<2>) -> Tensor<2> {
        write_slots(pool, self.slots(), states)
    }
}

/// A pool `[slots, numbers]` with other numbers in some slots, each of which is there once. Where there is only a sum,
/// the old number is taken away first, which leaves an exact zero.
pub fn write_slots(pool: Tensor<2>, slots: Tensor<1, Int>, values: Tensor<2>) -> Tensor<2> {
    let before = pool.clone().select(0, slots.clone()).neg();
    let zeroed = pool.select_assign(0, slots.clone(), before, IndexingUpdateOp::Add);
    zeroed.select_assign(0, slots, values, IndexingUpdateOp::Add)
}

impl Deref for SequenceRows {
    type Target = [StateRows];

    fn deref(&self) -> &[StateRows] {
        &self.sequences
    }
}

/// The table of GPU kernels: sequences, then their chunks, then all rows that are in a sequence. A sequence has its
/// first row, the row after its last, its slot, whether it begins, and its first chunk; a chunk has its first row, the
/// row after its last, and the same two of its sequence.
#[derive(Clone, Debug)]
pub(super) struct SequenceTable {
    pub words: Tensor<1, Int>,
    pub sequences: usize,
    pub chunks: usize,
    /// Rows that are in a sequence.
    pub rows: usize,
}

impl SequenceTable {
    fn new(sequences: &[StateRows], device: &Device) -> Self {
        let (mut spans, mut chunks, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for sequence in sequences {
            let [start, end] = [sequence.rows.start, sequence.rows.end].map(|row| row as i32);
            let first = chunks.len() / CHUNK_FIELDS;
            spans.extend([start, end, sequence.slot as i32, i32::from(sequence.begins), first as i32]);
            for first in sequence.rows.clone().step_by(CHUNK) {
                let last = (first + CHUNK).min(sequence.rows.end);
                chunks.extend([first as i32, last as i32, start, end]);
            }
            rows.extend(start..end);
        }
        let counts = [chunks.len() / CHUNK_FIELDS, rows.len()];
        let mut words = [spans, chunks, rows].concat();
        // a buffer of nothing cannot be bound
        words.resize(words.len().max(1), 0);
        Self {
            words: int_tensor(words, &device.clone().inner()),
            sequences: sequences.len(),
            chunks: counts[0],
            rows: counts[1],
        }
    }

    /// Offsets in the table of chunks and of rows.
    pub fn chunks_at(&self) -> usize {
        self.sequences * SEQUENCE_FIELDS
    }

    pub fn rows_at(&self) -> usize {
        self.chunks_at() + self.chunks * CHUNK_FIELDS
    }
}

/// Heads of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and of keys.
    pub keys: usize,
    /// Heads of values; consecutive ones share a key head.
    pub values: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Columns of queries, keys and values side by side.
    pub fn channels(&self) -> usize {
        2 * self.keys * self.key_dim + self.values * self.value_dim
    }

    /// Value heads of a key head.
    pub fn group(&self) -> usize {
        self.values / self.keys
    }

    /// Numbers of a sequence's state, `[values, key_dim, value_dim]`.
    pub fn state(&self) -> usize {
        self.values * self.key_dim * self.value_dim
    }
}
