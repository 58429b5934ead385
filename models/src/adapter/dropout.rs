//! Dropout of adapter inputs as a pure function of sample, position, layer, module and element.

use crate::random::philox;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use rayon::prelude::*;
use std::ops::Range;

/// Identifies a sequence of an optimizer step. What is dropped depends on this key, the position, the layer, the module and the
/// element alone, so that neither the division into micro-batches nor recomputation changes it.
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
        let key = [
            self.seed as u32 ^ 0xD20B_0A75,
            (self.seed >> 32) as u32 ^ 0x1F83_C96E,
        ];
        let counter = [
            self.step,
            self.prompt_index as u32,
            (self.prompt_index >> 32) as u32,
            self.sample,
        ];
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
    /// Dropout at `rate` in [0, 1) for the sequences of a forward pass, in order, each with its number of rows. `None` at rate 0.
    #[must_use]
    pub fn new(
        rate: f64,
        sequences: impl IntoIterator<Item = (DropoutKey, usize)>,
        device: &Device,
    ) -> Option<Self> {
        let whole = sequences.into_iter().map(|(key, length)| (key, 0..length));
        Self::of_parts(rate, whole, device)
    }

    /// The same for parts of sequences: the rows of each, counted from its first.
    #[must_use]
    pub fn of_parts(
        rate: f64,
        parts: impl IntoIterator<Item = (DropoutKey, Range<usize>)>,
        device: &Device,
    ) -> Option<Self> {
        let rows = |(key, rows): (DropoutKey, Range<usize>)| {
            let words = key.words();
            rows.map(move |position| (words, position as u32))
        };
        (rate > 0.0).then(|| Self {
            rate,
            rows: parts.into_iter().flat_map(rows).collect(),
            device: device.clone(),
        })
    }

    /// 1 − rate, by which the kept elements have to be divided.
    pub(crate) fn keep(&self) -> f64 {
        1.0 - self.rate
    }

    /// `x` of shape `[rows, width]` with the dropped elements set to zero; `place` is the index of the adapter.
    pub(crate) fn apply(&self, x: Tensor<2>, place: usize) -> Tensor<2> {
        let [rows, width] = x.dims();
        assert_eq!(rows, self.rows.len(), "rows of the sequences");
        let dropped = self.dropped(width, place as u32);
        let dropped = TensorData::new(dropped, [rows, width]);
        x.mask_fill(Tensor::<2, Bool>::from_data(dropped, &self.device), 0.0)
    }

    fn dropped(&self, width: usize, place: u32) -> Vec<bool> {
        // below 2³² as the rate is below one
        let threshold = (self.rate * 2.0_f64.powi(32)) as u32;
        let mut dropped = vec![false; self.rows.len() * width];
        let by_row = dropped.par_chunks_mut(width.max(1)).enumerate();
        by_row.for_each(|(row, values)| {
            let (key, position) = self.rows[row];
            for (block, four) in values.chunks_mut(4).enumerate() {
                let words = philox([position, place, block as u32, 0], key);
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
        DropoutKey {
            seed: 7,
            step: 3,
            prompt_index,
            sample,
        }
    }

    fn dropped(keys: &[DropoutKey], length: usize, width: usize, place: u32) -> Vec<bool> {
        let sequences: Vec<_> = keys.iter().map(|&key| (key, length)).collect();
        dropped_rows(&sequences, width, place)
    }

    fn dropped_rows(sequences: &[(DropoutKey, usize)], width: usize, place: u32) -> Vec<bool> {
        Dropout::new(0.1, sequences.iter().copied(), &Device::flex())
            .unwrap()
            .dropped(width, place)
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
        let part = Dropout::of_parts(0.1, parts, &Device::flex()).unwrap();
        assert_eq!(
            part.dropped(width, 4),
            together[3 * width..(length + 2) * width]
        );
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
            dropped(
                &[DropoutKey {
                    step: 4,
                    ..key(1, 0)
                }],
                8,
                32,
                4,
            ),
            dropped(
                &[DropoutKey {
                    seed: 8,
                    ..key(1, 0)
                }],
                8,
                32,
                4,
            ),
        ];
        for other in others {
            assert_ne!(first, other);
        }
    }

    #[test]
    fn the_rate_is_what_was_asked_for() {
        let dropped = dropped(&[key(0, 0)], 64, 512, 0);
        let share = dropped.iter().filter(|d| **d).count() as f64 / dropped.len() as f64;
        assert!((share - 0.1).abs() < 0.01, "{share}");
        assert!(Dropout::new(0.0, [(key(0, 0), 1)], &Device::flex()).is_none());
    }
}
