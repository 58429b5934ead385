//! Rows of sequences as indices of tensor operations.

use super::{CHUNK, SequenceRows, StateRows};
use burn::tensor::{Device, Int, Tensor, TensorData};

/// Indices into rows of a forward pass, the last inputs of the sequences before them, and a row of zeros at the end.
#[derive(Debug)]
pub struct TapRows {
    /// For each tap the row that every row multiplies with it.
    pub taps: Vec<Tensor<1, Int>>,
    /// The last inputs of every sequence, `[sequences · (taps − 1)]`.
    pub last: Tensor<1, Int>,
}

impl TapRows {
    pub(super) fn new(sequences: &SequenceRows, rows: usize, taps: usize, device: &Device) -> Self {
        let before = taps - 1;
        let zeros = rows + sequences.len() * before;
        let mut of_taps = vec![vec![zeros; rows]; taps];
        let mut last = Vec::new();
        for (i, StateRows { rows: span, .. }) in sequences.iter().enumerate() {
            let inherited = sequences.rows_before(i, before);
            // the sequence's inputs by their index, first those before it: of its parents, or of its state
            let input = |index: usize| match index.checked_sub(before) {
                None => inherited.get(before - 1 - index).copied().unwrap_or(rows + i * before + index),
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

/// Sequences padded to one length in each generation, and back.
#[derive(Debug)]
pub struct PaddedRows {
    /// The generations, the first one without parents.
    pub generations: Vec<PaddedGeneration>,
    /// The padded place of every row, those of one generation behind those of the other, and the one after all of them
    /// for a row in no sequence.
    pub places: Tensor<1, Int>,
}

/// The sequences of a generation.
#[derive(Debug)]
pub struct PaddedGeneration {
    /// The row of every padded place, `[sequences · width]`; the one after all rows for padding.
    pub spread: Tensor<1, Int>,
    /// Sequences of the generation.
    pub sequences: usize,
    /// Rows of a sequence: a power of two, or whole chunks.
    pub width: usize,
    /// The sequences' parents, by their places in the generation before; none in the first one.
    pub parents: Option<Tensor<1, Int>>,
}

impl PaddedRows {
    pub(super) fn new(sequences: &SequenceRows, rows: usize, device: &Device) -> Self {
        let tree = sequences.generations();
        let (mut first, mut padded) = (0, Vec::new());
        let mut places = vec![usize::MAX; rows];
        for (index, members) in tree.members.iter().enumerate() {
            let longest = members.iter().map(|&i| sequences[i].rows.len()).max().unwrap_or(1);
            let width = if longest < CHUNK { longest.next_power_of_two() } else { longest.next_multiple_of(CHUNK) };
            let mut spread = Vec::with_capacity(members.len() * width);
            for &i in members {
                let span = &sequences[i].rows;
                for (row, place) in span.clone().zip(first..) {
                    places[row] = place;
                }
                spread.extend((0..width).map(|c| if c < span.len() { span.start + c } else { rows }));
                first += width;
            }
            let before = index.checked_sub(1).map(|before| &tree.members[before]);
            let place_of =
                |before: &[usize], i: usize| before.iter().position(|&parent| tree.parents[i] == Some(parent));
            let parents = before.map(|before| members.iter().filter_map(|&i| place_of(before, i)));
            padded.push(PaddedGeneration {
                spread: integers(spread, device),
                sequences: members.len(),
                width,
                parents: parents.map(|parents| integers(parents, device)),
            });
        }
        let places = places.into_iter().map(|place| place.min(first));
        Self { places: integers(places, device), generations: padded }
    }
}

pub(super) fn integers(values: impl IntoIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i32> = values.into_iter().map(|i| i as i32).collect();
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), device)
}
