//! Sums and means over the sequences of a micro-batch, and back to their tokens.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Reduces `[tokens]` vectors by sequence, for losses that look at whole sequences: build it from
/// [`TokenInputs::lengths`]. Sequences without tokens are left out.
///
/// [`TokenInputs::lengths`]: super::TokenInputs::lengths
#[derive(Clone, Debug)]
pub struct SequenceReduction {
    /// For every sequence, padded to the longest: its tokens' places; the number of tokens where it has no more.
    /// `[sequences · width]`
    places: Tensor<1, Int>,
    /// The sequence of every token, `[tokens]`.
    owners: Tensor<1, Int>,
    /// Tokens of each sequence, `[sequences]`.
    counts: Tensor<1>,
    width: usize,
}

impl SequenceReduction {
    /// Sequences of these lengths, one after another.
    pub fn new(lengths: &[usize], device: &Device) -> Self {
        let lengths: Vec<usize> = lengths.iter().copied().filter(|&n| n > 0).collect();
        let width = lengths.iter().copied().max().unwrap_or(0);
        let tokens: usize = lengths.iter().sum();
        let (mut places, mut owners) = (Vec::new(), Vec::with_capacity(tokens));
        for (i, &n) in lengths.iter().enumerate() {
            let start = owners.len();
            places.extend((0..width).map(|t| if t < n { start + t } else { tokens } as i32));
            owners.extend(vec![i as i32; n]);
        }
        let ints = |v: Vec<i32>| {
            let n = v.len();
            Tensor::<1, Int>::from_data(TensorData::new(v, [n]), device)
        };
        let counts: Vec<f64> = lengths.iter().map(|&n| n as f64).collect();
        Self {
            places: ints(places),
            owners: ints(owners),
            counts: Tensor::from_data(TensorData::new(counts, [lengths.len()]), device),
            width,
        }
    }

    /// Each sequence's sum: `[tokens]` to `[sequences]`.
    pub fn sum(&self, values: Tensor<1>) -> Tensor<1> {
        let sequences = self.counts.dims()[0];
        let zero = values.clone().narrow(0, 0, 1).zeros_like();
        let padded = Tensor::cat(vec![values, zero], 0).select(0, self.places.clone());
        padded.reshape([sequences, self.width]).sum_dim(1).reshape([sequences])
    }

    /// Each sequence's mean: `[tokens]` to `[sequences]`.
    pub fn mean(&self, values: Tensor<1>) -> Tensor<1> {
        self.sum(values) / self.counts.clone()
    }

    /// A number of each sequence for all of its tokens: `[sequences]` to `[tokens]`.
    pub fn broadcast(&self, values: Tensor<1>) -> Tensor<1> {
        values.select(0, self.owners.clone())
    }
}
