//! The causal convolution in tensor operations: a gather of rows for each tap.

use super::layout::Gathers;
use burn::tensor::Tensor;
use burn::tensor::activation::silu;
use firebrick_backends::precision::{stored_as, widened};

/// Of sequences that begin: `[rows, channels]`.
pub(super) fn whole(x: &Tensor<2>, w: &Tensor<2>, gathers: &Gathers) -> Tensor<2> {
    let ([_, channels], [_, taps]) = (x.dims(), w.dims());
    let rows = gathers.sequences * (taps - 1);
    let states = Tensor::zeros([rows, channels], (&x.device(), x.dtype()));
    continued(x, w, states, gathers).0
}

/// Of sequences whose last inputs are `states`, `[sequences · (taps − 1), channels]`; also the new last inputs.
pub(super) fn continued(x: &Tensor<2>, w: &Tensor<2>, states: Tensor<2>, gathers: &Gathers) -> (Tensor<2>, Tensor<2>) {
    let ([_, channels], stored) = (x.dims(), x.dtype());
    let zeros = Tensor::zeros([1, channels], (&x.device(), stored));
    let all = Tensor::cat(vec![x.clone(), states, zeros], 0);
    let w = widened(w.clone()).transpose();
    let products = gathers
        .taps
        .iter()
        .enumerate()
        .map(|(tap, rows)| widened(all.clone().select(0, rows.clone())) * w.clone().narrow(0, tap, 1));
    let sum = products.reduce(|sum, product| sum + product);
    let sum = sum.unwrap_or_else(|| unreachable!("a convolution has taps"));
    let last = all.select(0, gathers.last.clone());
    (stored_as(silu(sum), stored), last)
}
