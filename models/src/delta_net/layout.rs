//! The sequences of a forward pass as gated `DeltaNet` takes them.

use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{SequenceRows, StateRows};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Tokens of a chunk of the delta rule.
pub(super) const CHUNK: usize = 64;

/// The rows of each sequence, and the indices of tensor operations, which are made where they are needed first and
/// shared by all layers.
#[derive(Clone, Debug)]
pub(crate) struct DeltaLayout {
    sequences: SequenceRows,
    rows: usize,
    taps: usize,
    device: Device,
    gathers: Arc<OnceLock<Gathers>>,
}

/// Indices into rows of a forward pass, those of states after them, and a row of zeros at the end.
#[derive(Clone, Debug)]
pub(super) struct Gathers {
    /// For each tap the row that every row multiplies with it.
    pub taps: Vec<Tensor<1, Int>>,
    /// The last inputs of every sequence, `[sequences · (taps − 1)]`.
    pub last: Tensor<1, Int>,
    /// The row of every padded place, `[sequences · width]`, without states: the zeros come right after the rows.
    pub spread: Tensor<1, Int>,
    /// The padded place of every row, and the one after all of them for a row in no sequence.
    pub places: Tensor<1, Int>,
    /// The slot of each sequence.
    pub slots: Tensor<1, Int>,
    /// Zero where a sequence begins, one elsewhere: `[sequences, 1]`.
    pub continues: Vec<f32>,
    pub sequences: usize,
    pub width: usize,
}

impl DeltaLayout {
    /// Of sequences among `rows` rows, for a convolution of `taps` taps.
    pub fn new(sequences: Vec<StateRows>, rows: usize, taps: usize, device: &Device) -> Self {
        Self {
            sequences: SequenceRows::new(sequences, device),
            rows,
            taps,
            device: device.clone(),
            gathers: Arc::default(),
        }
    }

    /// Of whole sequences that begin with the forward pass.
    pub fn whole(sequences: impl Iterator<Item = Range<usize>>, rows: usize, taps: usize, device: &Device) -> Self {
        let own = |rows| StateRows { rows, slot: 0, begins: true };
        Self::new(sequences.map(own).collect(), rows, taps, device)
    }

    pub fn sequences(&self) -> &SequenceRows {
        &self.sequences
    }

    /// The indices of tensor operations.
    pub(super) fn gathers(&self) -> &Gathers {
        self.gathers.get_or_init(|| self.indices())
    }

    fn indices(&self) -> Gathers {
        let ints = |values: Vec<usize>| {
            let values: Vec<i32> = values.into_iter().map(|i| i as i32).collect();
            let n = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [n]), &self.device)
        };
        let (rows, before, count) = (self.rows, self.taps - 1, self.sequences.len());
        let zeros = rows + count * before;
        let longest = self.sequences.iter().map(|own| own.rows.len()).max();
        let longest = longest.unwrap_or(1);
        let width = if longest < CHUNK { longest.next_power_of_two() } else { longest.next_multiple_of(CHUNK) };
        let mut taps = vec![vec![zeros; rows]; self.taps];
        let (mut last, mut spread) = (Vec::new(), Vec::new());
        let mut places = vec![count * width; rows];
        for (i, StateRows { rows: own, .. }) in self.sequences.iter().enumerate() {
            // the sequence's inputs by their index, those of its state first
            let input = |index: usize| match index.checked_sub(before) {
                None => rows + i * before + index,
                Some(new) => own.start + new,
            };
            for (index, row) in own.clone().enumerate() {
                for (tap, of_rows) in taps.iter_mut().enumerate() {
                    of_rows[row] = input(index + tap);
                }
                places[row] = i * width + index;
            }
            last.extend((own.len()..own.len() + before).map(input));
            spread.extend((0..width).map(|c| if c < own.len() { own.start + c } else { rows }));
        }
        let continues = self.sequences.iter();
        Gathers {
            taps: taps.into_iter().map(ints).collect(),
            last: ints(last),
            spread: ints(spread),
            places: ints(places),
            slots: ints(self.sequences.iter().map(|own| own.slot).collect()),
            continues: continues.map(|own| if own.begins { 0.0 } else { 1.0 }).collect(),
            sequences: count,
            width,
        }
    }
}
