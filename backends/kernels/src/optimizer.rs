//! What optimizers call: `AdamW` in one pass, and moments in 8 bits.

use super::dispatch::kernels;
use super::shapes::{AdamWOutput, AdamWStep, QuantizationMap, QuantizedBlocks};
use burn::tensor::{DType, Tensor};
use std::ops::Range;

/// Whether there is a kernel for [`adamw`] of this parameter. The parameter is `[rows, columns]`.
#[must_use]
pub fn has_adamw(value: &Tensor<2>) -> bool {
    kernels(&value.device()).has_adamw(value)
}

/// One `AdamW` update of `rows` of a parameter, in place where it is not shared, in one pass over parameter, gradient
/// and moments.
///
/// `gradient` is that of the whole parameter. `moments` are those of the rows, in any float type, and come back in that
/// type; `None` stands for zeros, and gives moments in f32. Where the parameter is the f32 master of a half-precision
/// one, `stored`, its rows are written in the same pass. Parameter and gradient are `[all rows, columns]`; moments are
/// those of `rows`, `[rows, columns]` each, and `stored` has the parameter's shape.
///
/// # Panics
/// Where [`has_adamw`] says no.
#[must_use]
pub fn adamw(
    value: Tensor<2>,
    rows: Range<usize>,
    gradient: &Tensor<2>,
    moments: Option<[Tensor<2>; 2]>,
    stored: Option<Tensor<2>>,
    step: &AdamWStep,
) -> AdamWOutput {
    let kernels = kernels(&value.device());
    let updated = kernels.adamw(value, rows, gradient, moments, stored, step);
    updated.expect("`has_adamw` reports that there is a kernel")
}

/// Quantises a matrix to 8 bits per element, block by block (arXiv:2110.02861).
///
/// `None` where no kernel is used for the tensor. The matrix is `[rows, columns]`.
#[must_use]
pub fn quantize_blockwise(values: &Tensor<2>, map: &QuantizationMap<'_>) -> Option<QuantizedBlocks> {
    kernels(&values.device()).quantize_blockwise(values, map)
}

/// The matrix that quantised blocks represent, in a shape and type, given the 256 entries of the quantisation map.
///
/// `None` where no kernel is used for the tensors. The entries are `[256]`.
#[must_use]
pub fn dequantize_blockwise(
    blocks: &QuantizedBlocks,
    entries: &Tensor<1>,
    shape: [usize; 2],
    dtype: DType,
) -> Option<Tensor<2>> {
    kernels(&blocks.scales.device()).dequantize_blockwise(blocks, entries, shape, dtype)
}
