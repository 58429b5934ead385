//! Dropout of adapter inputs as a pure function of sample, position, layer, module and element.

use crate::random::philox;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use firebrick_backends::kernels::ExpertRows;
use rayon::prelude::*;
use std::ops::Range;

/// Identifies a sequence of an optimizer step. What is dropped depends on this key, the position, the layer, the module
/// and the element alone, so that neither the division into micro-batches nor recomputation changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DropoutKey {
    /// The run's seed.
    pub seed: u64,
    /// Optimizer step.
    pub step: u32,
    /// Index of the prompt among all the run's draws.
    pub prompt_index: u64,
    /// Index of the completion in its group.
    pub sample: u32,
}

impl DropoutKey {
    /// The key of the sequence's own generator.
    fn words(&self) -> [u32; 2] {
        // whitened, so that it never replays a `DrawKey`'s counter under its key
        let key = [self.seed as u32 ^ 0xD20B_0A75, (self.seed >> 32) as u32 ^ 0x1F83_C96E];
        let counter = [self.step, self.prompt_index as u32, (self.prompt_index >> 32) as u32, self.sample];
        let [low, high, ..] = philox(counter, key);
        [low, high]
    }
}

/// Dropout of one forward pass over the rows of whole sequences.
#[derive(Clone, Debug)]
pub struct Dropout {
    rate: f64,
    /// Key and position of every row.
    rows: Vec<([u32; 2], u32)>,
    device: Device,
}

impl Dropout {
    /// Dropout at `rate` in [0, 1) for the sequences of a forward pass, in order, each with its number of rows. `None`
    /// at rate 0.
    pub fn new(rate: f64, sequences: impl IntoIterator<Item = (DropoutKey, usize)>, device: &Device) -> Option<Self> {
        let whole = sequences.into_iter().map(|(key, length)| (key, 0..length));
        Self::from_parts(rate, whole, device)
    }

    /// [`Self::new`] for parts of sequences: the rows of each, counted from its first.
    pub fn from_parts(
        rate: f64,
        parts: impl IntoIterator<Item = (DropoutKey, Range<usize>)>,
        device: &Device,
    ) -> Option<Self> {
        let rows = |(key, rows): (DropoutKey, Range<usize>)| {
            let words = key.words();
            rows.map(move |position| (words, position as u32))
        };
        (rate > 0.0).then(|| Self { rate, rows: parts.into_iter().flat_map(rows).collect(), device: device.clone() })
    }

    /// 1 − rate, by which the kept elements have to be divided.
    pub(crate) fn keep(&self) -> f64 {
        1.0 - self.rate
    }

    /// `x` of shape `[rows, width]` with the dropped elements set to zero; `place` is the index of the adapter.
    pub(crate) fn apply(&self, x: Tensor<2>, place: usize) -> Tensor<2> {
        let [rows, _] = x.dims();
        assert_eq!(rows, self.rows.len(), "rows of the sequences");
        self.drop_from(x, place, rows, |row| (row, 0))
    }

    /// [`Self::apply`] for a row of each choice of a token, sorted by expert: each by its expert, whichever of the
    /// token's choices it was.
    pub(crate) fn apply_to_choices(&self, x: Tensor<2>, place: usize, choices: &ExpertRows) -> Tensor<2> {
        let choice_rows: Vec<(usize, usize)> = choices.tokens_and_experts().collect();
        self.drop_from(x, place, choice_rows.len(), |row| {
            let (token, expert) = choice_rows[row];
            (token, 1 + expert as u32)
        })
    }

    fn drop_from(
        &self,
        x: Tensor<2>,
        place: usize,
        rows: usize,
        of: impl Fn(usize) -> (usize, u32) + Sync,
    ) -> Tensor<2> {
        let [_, width] = x.dims();
        let dropped = self.dropped([rows, width], place as u32, of);
        let dropped = TensorData::new(dropped, [rows, width]);
        x.mask_fill(Tensor::<2, Bool>::from_data(dropped, &self.device), 0.0)
    }

    /// Dropped elements of rows, given the token of each, and 0 or one more than the expert that reads it alone.
    fn dropped(&self, [rows, width]: [usize; 2], place: u32, of: impl Fn(usize) -> (usize, u32) + Sync) -> Vec<bool> {
        // below 2³² as the rate is below one
        let threshold = (self.rate * 2.0_f64.powi(32)) as u32;
        let mut dropped = vec![false; rows * width];
        let by_row = dropped.par_chunks_mut(width.max(1)).enumerate();
        by_row.for_each(|(row, values)| {
            let (token, expert) = of(row);
            let (key, position) = self.rows[token];
            for (block, four) in values.chunks_mut(4).enumerate() {
                let words = philox([position, place, block as u32, expert], key);
                for (value, word) in four.iter_mut().zip(words) {
                    *value = word < threshold;
                }
            }
        });
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(prompt_index: u64, sample: u32) -> DropoutKey {
        DropoutKey { seed: 7, step: 3, prompt_index, sample }
    }

    fn dropped(keys: &[DropoutKey], length: usize, width: usize, place: u32) -> Vec<bool> {
        let sequences: Vec<_> = keys.iter().map(|&key| (key, length)).collect();
        dropped_rows(&sequences, width, place)
    }

    fn dropped_rows(sequences: &[(DropoutKey, usize)], width: usize, place: u32) -> Vec<bool> {
        let dropout = Dropout::new(0.1, sequences.iter().copied(), &Device::flex()).unwrap();
        of_all(&dropout, width, place)
    }

    fn of_all(dropout: &Dropout, width: usize, place: u32) -> Vec<bool> {
        dropout.dropped([dropout.rows.len(), width], place, |row| (row, 0))
    }

    #[test]
    fn what_is_dropped_follows_the_sample_and_not_the_batch() {
        let (a, b) = (key(1, 0), key(1, 1));
        let (length, width) = (5, 13);
        let together = dropped(&[a, b], length, width, 4);
        let alone = dropped(&[b], length, width, 4);
        assert_eq!(together[length * width..], alone);
        let longer = dropped(&[b], length + 2, width, 4);
        assert_eq!(longer[..length * width], alone);
        let parts = [(a, 3..length), (b, 0..2)];
        let part = Dropout::from_parts(0.1, parts, &Device::flex()).unwrap();
        assert_eq!(of_all(&part, width, 4), together[3 * width..(length + 2) * width]);
        let behind_a_shorter_one = dropped_rows(&[(a, 2), (b, length)], width, 4);
        assert_eq!(behind_a_shorter_one[2 * width..], alone);
    }

    #[test]
    fn samples_steps_seeds_and_places_drop_other_elements() {
        let first = dropped(&[key(1, 0)], 8, 32, 4);
        let others = [
            dropped(&[key(2, 0)], 8, 32, 4),
            dropped(&[key(1 << 40, 0)], 8, 32, 4),
            dropped(&[key(1, 1)], 8, 32, 4),
            dropped(&[key(1, 0)], 8, 32, 5),
            dropped(&[DropoutKey { step: 4, ..key(1, 0) }], 8, 32, 4),
            dropped(&[DropoutKey { seed: 8, ..key(1, 0) }], 8, 32, 4),
        ];
        for other in others {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn rows_of_experts_follow_the_token_and_the_expert_and_not_the_choice() {
        let device = Device::flex();
        let dropout = Dropout::new(0.5, [(key(1, 0), 2)], &device).unwrap();
        let ones = |rows: usize| Tensor::<2>::ones([rows, 16], &device);
        let kept = |experts: &[u32]| -> Vec<Vec<f32>> {
            let rows = ExpertRows::new(experts, 2, 4, &device);
            let kept: Vec<f32> = dropout.apply_to_choices(ones(4), 3, &rows).try_into_vec_as().unwrap();
            kept.chunks(16).map(<[f32]>::to_vec).collect()
        };
        // token 0 goes to experts 1 and 3, token 1 to 0 and 3
        let [sorted, turned] = [kept(&[1, 3, 0, 3]), kept(&[3, 1, 3, 0])];
        assert_eq!(sorted, turned);
        let token: Vec<f32> = dropout.apply(ones(2), 3).try_into_vec_as().unwrap();
        let mut distinct = sorted;
        distinct.extend(token.chunks(16).map(<[f32]>::to_vec));
        distinct.sort_by(|a, b| a.partial_cmp(b).unwrap());
        distinct.dedup();
        assert_eq!(distinct.len(), 6, "each row by itself");
    }

    #[test]
    fn the_rate_is_what_was_asked_for() {
        let dropped = dropped(&[key(0, 0)], 64, 512, 0);
        let share = dropped.iter().filter(|d| **d).count() as f64 / dropped.len() as f64;
        assert!((share - 0.1).abs() < 0.01, "{share}");
        assert!(Dropout::new(0.0, [(key(0, 0), 1)], &Device::flex()).is_none());
    }
}
