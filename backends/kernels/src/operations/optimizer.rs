//! Operations of optimizers: `AdamW` in one pass, moments in 8 bits, and sums of gradients of rows.

use super::{by_device, no_kernel, operations};
use crate::formulas::block8;
use crate::shapes::{AdamWOutput, AdamWStep, QuantizationMap, QuantizedBlocks, RowsByToken, int_tensor};
use burn::tensor::{DType, IndexingUpdateOp, Tensor};
use firebrick_device::precision::widened;
use std::ops::Range;

operations! {
    /// One `AdamW` update of `rows` of a parameter, in place where it is not shared, in one pass over parameter,
    /// gradient and moments.
    ///
    /// `gradient` is that of the whole parameter. `moments` are those of the rows, in any float type, and come back in
    /// that type; `None` stands for zeros, and gives moments in f32. Where the parameter is the f32 master of a
    /// half-precision one, `stored`, its rows are written in the same pass. Parameter and gradient are `[all rows,
    /// columns]`; moments are those of `rows`, `[rows, columns]` each, and `stored` has the parameter's shape.
    ///
    /// # Panics
    /// If [`has_adamw`] is false.
    pub fn adamw(
        value: Tensor<2>,
        rows: Range<usize>,
        gradient: &Tensor<2>,
        moments: Option<[Tensor<2>; 2]>,
        stored: Option<Tensor<2>>,
        step: &AdamWStep,
    ) -> AdamWOutput {
        cube: adamw if cube::adamw::takes(&value);
        else { no_kernel("adamw") }
    }

    /// `sum + gradient` of matrices of one shape, in f32; in place where `sum`, in f32, is not shared. Gradients of a
    /// half-precision pass are added up this way, so that sums of micro-batches lose nothing to rounding.
    pub fn accumulate(sum: Tensor<2>, gradient: &Tensor<2>) -> Tensor<2> {
        cube: accumulate if cube::accumulate::takes(&sum, gradient);
        else { sum + widened(gradient.clone()) }
    }

    /// Quantizes a matrix, `[rows, columns]`, to 8 bits per element, block by block (arXiv:2110.02861). On a GPU a code
    /// may differ from the host's where a value is halfway between two.
    pub fn quantize_blockwise(values: &Tensor<2>, map: &QuantizationMap<'_>) -> QuantizedBlocks {
        cube: block8 if alike(Operation::Block8, &[values]);
        else { block8::quantize(values, map) }
    }

    /// The matrix that quantized blocks represent, in a shape and type, given the entries of the quantization map,
    /// `[256]`.
    pub fn dequantize_blockwise(
        blocks: &QuantizedBlocks,
        entries: &Tensor<1>,
        shape: [usize; 2],
        dtype: DType,
    ) -> Tensor<2> {
        cube: block8 if alike(Operation::Block8, &[&blocks.scales]);
        else { block8::dequantize(blocks, entries, shape, dtype) }
    }

    /// Adds each of `rows`, `[tokens, n]`, to the row of `sum`, `[vocab, n]`, of its token (`torch.index_add_`); in
    /// place where `sum` is not shared. The kernel adds in a fixed order without atomics.
    pub fn scatter_add_rows(sum: Tensor<2>, groups: &RowsByToken, rows: &Tensor<2>) -> Tensor<2> {
        cube: embedding if alike(Operation::Embedding, &[&sum, rows]);
        else {
            let ids = int_tensor(groups.rows.to_vec(), &sum.device());
            sum.select_assign(0, ids, rows.clone(), IndexingUpdateOp::Add)
        }
    }
}

/// Returns true if there is a kernel for [`adamw`] of this parameter. The parameter is `[rows, columns]`.
pub fn has_adamw(value: &Tensor<2>) -> bool {
    by_device!(&value.device(), cpu => false, cube => crate::cube::adamw::takes(value))
}
