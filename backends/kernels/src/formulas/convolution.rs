//! The causal convolution in tensor operations: a gather of rows for each tap.

use crate::delta::{SequenceRows, TapRows};
use burn::tensor::Tensor;
use burn::tensor::activation::silu;
use firebrick_device::precision::{stored_as, widened};

/// Of sequences that begin: `[rows, channels]`.
pub(crate) fn whole(x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Tensor<2> {
    let ([_, channels], [_, taps]) = (x.dims(), w.dims());
    let states = Tensor::zeros([sequences.len() * (taps - 1), channels], (&x.device(), x.dtype()));
    convolved(x, w, states, sequences).0
}

/// Of sequences whose last inputs are in `pool`, where the new ones go.
pub(crate) fn continued(
    x: &Tensor<2>,
    w: &Tensor<2>,
    pool: Tensor<2>,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let ([_, channels], [_, numbers]) = (x.dims(), pool.dims());
    let states = sequences.read(&pool).reshape([sequences.len() * (numbers / channels), channels]);
    let (out, last) = convolved(x, w, states, sequences);
    (out, sequences.write(pool, last.reshape([sequences.len(), numbers])))
}

/// Of sequences whose last inputs are `states`, `[sequences · (taps − 1), channels]`; also the new last inputs.
fn convolved(x: &Tensor<2>, w: &Tensor<2>, states: Tensor<2>, sequences: &SequenceRows) -> (Tensor<2>, Tensor<2>) {
    let ([rows, channels], [_, taps], stored) = (x.dims(), w.dims(), x.dtype());
    let TapRows { taps, last } = sequences.tap_rows(rows, taps);
    let zeros = Tensor::zeros([1, channels], (&x.device(), stored));
    let joined = Tensor::cat(vec![x.clone(), states, zeros], 0);
    let w = widened(w.clone()).transpose();
    let products = taps
        .iter()
        .enumerate()
        .map(|(tap, rows)| widened(joined.clone().select(0, rows.clone())) * w.clone().narrow(0, tap, 1));
    let sum = products.reduce(|sum, product| sum + product);
    let sum = sum.unwrap_or_else(|| unreachable!("a convolution has taps"));
    (stored_as(silu(sum), stored), joined.select(0, last.clone()))
}
