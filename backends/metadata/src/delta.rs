//! Sequences and heads of gated `DeltaNet` layers.

mod gathers;
mod generations;
mod table;

pub use gathers::{PaddedGeneration, PaddedRows, TapRows};
pub use generations::{Generations, Reader};
pub use table::SequenceTable;

use burn::tensor::{Device, IndexingUpdateOp, Int, Tensor, TensorData};
use firebrick_device::device::is_cpu;
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

/// Tokens of a chunk on GPUs, and in tensor operations.
pub const CHUNK: usize = 64;

/// Most taps of a convolution's GPU kernel: a unit has an input and a weight of each in registers.
pub const MAX_TAPS: usize = 32;

/// Fields of a sequence in a [`SequenceTable`].
pub const SEQUENCE_FIELDS: usize = 11;
/// Fields of a chunk in a [`SequenceTable`].
pub const CHUNK_FIELDS: usize = 3;
/// Fields of a reader in a [`SequenceTable`].
pub const READER_FIELDS: usize = 3;

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
    generations: Arc<Generations>,
    table: Option<SequenceTable>,
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
        Self::with_parents(sequences.into_iter().map(|sequence| (sequence, None)), device)
    }

    /// Whole sequences that begin with the forward pass, each with the index of an earlier one where it goes on behind
    /// that: it begins with its end state. For forward passes without a pool.
    ///
    /// # Panics
    /// If a sequence stands before the one that it begins with.
    pub fn whole(sequences: impl IntoIterator<Item = (Range<usize>, Option<usize>)>, device: &Device) -> Self {
        let sequences = sequences.into_iter();
        let whole = sequences.map(|(rows, parent)| (StateRows { rows, slot: 0, begins: parent.is_none() }, parent));
        Self::with_parents(whole, device)
    }

    fn with_parents(sequences: impl Iterator<Item = (StateRows, Option<usize>)>, device: &Device) -> Self {
        let (mut kept, mut parents) = (Vec::new(), Vec::new());
        // where a sequence went: one without rows is its parent, if anything
        let mut places: Vec<Option<usize>> = Vec::new();
        for (sequence, parent) in sequences {
            let before = places.len();
            assert!(parent.is_none_or(|parent| parent < before), "sequence {before} precedes its parent, {parent:?}");
            let parent = parent.and_then(|parent| places[parent]);
            if sequence.rows.is_empty() {
                places.push(parent);
                continue;
            }
            places.push(Some(kept.len()));
            kept.push(sequence);
            parents.push(parent);
        }
        let sequences: Arc<[StateRows]> = kept.into();
        let generations = Generations::new(parents);
        let table = (!is_cpu(device)).then(|| SequenceTable::new(&sequences, &generations, device));
        let generations = Arc::new(generations);
        Self { sequences, generations, table, device: device.clone(), gathers: Arc::default() }
    }

    /// Their table for GPU kernels; none on the CPU.
    pub fn table(&self) -> Option<&SequenceTable> {
        self.table.as_ref()
    }

    /// The parents and children of the sequences.
    pub fn generations(&self) -> &Generations {
        &self.generations
    }

    /// See [`Generations::rows_before`].
    pub fn rows_before(&self, sequence: usize, count: usize) -> Vec<usize> {
        self.generations.rows_before(|i| self[i].rows.clone(), sequence, count)
    }

    /// See [`Generations::readers`].
    pub fn readers(&self, sequence: usize, reach: usize) -> Vec<Reader> {
        self.generations.readers(|i| self[i].rows.clone(), sequence, reach)
    }

    /// The inputs of a convolution among `rows` rows.
    pub fn tap_rows(&self, rows: usize, taps: usize) -> &TapRows {
        self.gathers.taps.get_or_init(|| TapRows::new(self, rows, taps, &self.device))
    }

    /// The sequences in rows of one length.
    pub fn padded_rows(&self, rows: usize) -> &PaddedRows {
        self.gathers.padded.get_or_init(|| PaddedRows::new(self, rows, &self.device))
    }

    fn slots(&self) -> Tensor<1, Int> {
        let slots = || gathers::integers(self.iter().map(|sequence| sequence.slot), &self.device);
        self.gathers.slots.get_or_init(slots).clone()
    }

    /// The states of the sequences in a pool, `[sequences, numbers]`, zeros where they begin.
    pub fn read(&self, pool: &Tensor<2>) -> Tensor<2> {
        let continues: Vec<f32> = self.iter().map(|sequence| if sequence.begins { 0.0 } else { 1.0 }).collect();
        let continues = TensorData::new(continues, [self.len(), 1]);
        pool.clone().select(0, self.slots()) * Tensor::from_data(continues, (&pool.device(), pool.dtype()))
    }

    /// A pool, `[slots, numbers]`, with other states of the sequences, `[sequences, numbers]`.
    pub fn write(&self, pool: Tensor<2>, states: Tensor<2>) -> Tensor<2> {
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
