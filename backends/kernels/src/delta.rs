//! What the kernels of gated `DeltaNet` layers are told of sequences and heads.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebrick_device::device::is_cpu;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Tokens of a chunk on GPUs.
pub(super) const CHUNK: usize = 64;

/// Fields of a sequence and of a chunk in their table.
pub(super) const SEQUENCE_FIELDS: usize = 5;
pub(super) const CHUNK_FIELDS: usize = 4;

/// The rows of one sequence in a forward pass, one behind the other, and the state that they begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRows {
    /// Rows of the forward pass.
    pub rows: Range<usize>,
    /// Where its state is in a pool; not read in a forward pass without one.
    pub slot: usize,
    /// Whether the sequence begins here, with a state of zeros.
    pub begins: bool,
}

/// The rows of all sequences of a forward pass. No row is in two; rows in none get zeros. Made once, used by every
/// layer.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    all: Arc<[StateRows]>,
    /// The same for GPU kernels.
    #[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
    pub(super) table: Option<SequenceTable>,
}

impl SequenceRows {
    /// Prepares sequences for a device. Those without rows are left out.
    #[must_use]
    pub fn new(sequences: Vec<StateRows>, device: &Device) -> Self {
        let sequences = sequences.into_iter().filter(|own| !own.rows.is_empty());
        let all: Arc<[StateRows]> = sequences.collect();
        let table = (!is_cpu(device)).then(|| SequenceTable::new(&all, device));
        Self { all, table }
    }
}

impl Deref for SequenceRows {
    type Target = [StateRows];

    fn deref(&self) -> &[StateRows] {
        &self.all
    }
}

/// The table of GPU kernels: sequences, then their chunks, then all rows that are in a sequence. A sequence has its
/// first row, the row after its last, its slot, whether it begins, and its first chunk; a chunk has its first row, the
/// row after its last, and the same two of its sequence.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
pub(super) struct SequenceTable {
    pub words: Tensor<1, Int>,
    pub sequences: usize,
    pub chunks: usize,
    /// Rows that are in a sequence.
    pub rows: usize,
}

impl SequenceTable {
    fn new(all: &[StateRows], device: &Device) -> Self {
        let (mut sequences, mut chunks, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for own in all {
            let [start, end] = [own.rows.start, own.rows.end].map(|row| row as i32);
            let first = chunks.len() / CHUNK_FIELDS;
            sequences.extend([start, end, own.slot as i32, i32::from(own.begins), first as i32]);
            for first in own.rows.clone().step_by(CHUNK) {
                let last = (first + CHUNK).min(own.rows.end);
                chunks.extend([first as i32, last as i32, start, end]);
            }
            rows.extend(start..end);
        }
        let counts = [chunks.len() / CHUNK_FIELDS, rows.len()];
        let mut words = [sequences, chunks, rows].concat();
        // a buffer of nothing cannot be bound
        words.resize(words.len().max(1), 0);
        let length = words.len();
        let data = TensorData::new(words, [length]);
        Self {
            words: Tensor::from_data(data, (&device.clone().inner(), DType::I32)),
            sequences: all.len(),
            chunks: counts[0],
            rows: counts[1],
        }
    }

    /// Offsets in the table of chunks and of rows.
    #[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
    pub fn chunks_at(&self) -> usize {
        self.sequences * SEQUENCE_FIELDS
    }

    #[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
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
    #[must_use]
    pub fn channels(&self) -> usize {
        2 * self.keys * self.key_dim + self.values * self.value_dim
    }

    /// Value heads of a key head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.values / self.keys
    }

    /// Numbers of a sequence's state, `[values, key_dim, value_dim]`.
    #[must_use]
    pub fn state(&self) -> usize {
        self.values * self.key_dim * self.value_dim
    }
}
