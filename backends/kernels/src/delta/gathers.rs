//! Rows of sequences as indices of tensor operations.

use super::{CHUNK, StateRows};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// Indices into rows of a forward pass, the last inputs of the sequences before them, and a row of zeros at the end.
#[derive(Debug)]
pub(crate) struct TapRows {
    /// For each tap the row that every row multiplies with it.
    pub taps: Vec<Tensor<1, Int>>,
    /// The last inputs of every sequence, `[sequences · (taps − 1)]`.
    pub last: Tensor<1, Int>,
}

impl TapRows {
    pub(super) fn new(sequences: &[StateRows], rows: usize, taps: usize, device: &Device) -> Self {
        let before = taps - 1;
        let zeros = rows + sequences.len() * before;
        let mut of_taps = vec![vec![zeros; rows]; taps];
        let mut last = Vec::new();
        for (i, StateRows { rows: span, .. }) in sequences.iter().enumerate() {
            // the sequence's inputs by their index, those of its state first
            let input = |index: usize| match index.checked_sub(before) {
                None => rows + i * before + index,
                Some(new) => span.start + new,
            };
            for (index, row) in span.clone().enumerate() {
                for (tap, of_rows) in of_taps.iter_mut().enumerate() {
                    of_rows[row] = input(index + tap);
                }
            }
            last.extend((span.len()..span.len() + before).map(input));
        }
        Self { taps: of_taps.into_iter().map(|rows| integers(rows, device)).collect(), last: integers(last, device) }
    }
}

/// Sequences padded to one length, and back.
#[derive(Debug)]
pub(crate) struct PaddedRows {
    /// The row of every padded place, `[sequences · width]`; the one after all rows for padding.
    pub spread: Tensor<1, Int>,
    /// The padded place of every row, and the one after all of them for a row in no sequence.
    pub places: Tensor<1, Int>,
    /// Rows of a sequence: a power of two, or whole chunks.
    pub width: usize,
}

impl PaddedRows {
    pub(super) fn new(sequences: &[StateRows], rows: usize, device: &Device) -> Self {
        let longest = sequences.iter().map(|span| span.rows.len()).max().unwrap_or(1);
        let width = if longest < CHUNK { longest.next_power_of_two() } else { longest.next_multiple_of(CHUNK) };
        let mut spread = Vec::with_capacity(sequences.len() * width);
        let mut places = vec![sequences.len() * width; rows];
        for (i, StateRows { rows: span, .. }) in sequences.iter().enumerate() {
            for (index, row) in span.clone().enumerate() {
                places[row] = i * width + index;
            }
            spread.extend((0..width).map(|c| if c < span.len() { span.start + c } else { rows }));
        }
        Self { spread: integers(spread, device), places: integers(places, device), width }
    }
}

pub(super) fn integers(values: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i32> = values.into_iter().map(|i| i as i32).collect();
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), device)
}
