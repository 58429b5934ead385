//! Operations of optimizers: `AdamW` in one pass, moments in 8 bits, and sums of gradients of rows.

use super::{by_device, no_kernel, operations};
use crate::formulas::block8;
use crate::shapes::{AdamWOutput, AdamWSlice, AdamWStep, QuantizationMap, QuantizedBlocks, RowsByToken, int_tensor};
use burn::tensor::{DType, IndexingUpdateOp, Tensor};
use firebrick_device::precision::widened;

operations! {
    /// One `AdamW` update of slices of a parameter, in place where it is not shared, in one pass over parameter, gradient
    /// and moments. On NVIDIA GPUs the results hold once `batch` is [launched](AdamWBatch::launch), with those of other
    /// parameters; elsewhere at once.
    ///
    /// `gradient` is that of the whole parameter. Moments come back in their type, and as f32 for zeros. Where the
    /// parameter is the f32 master of a half-precision one, the rows of `stored` are written in the same pass. Parameter,
    /// gradient and `stored` are `[all rows, columns]`.
    ///
    /// # Panics
    /// If [`has_adamw`] is false.
    pub fn adamw(
        value: Tensor<2>,
        slices: Vec<AdamWSlice>,
        gradient: &Tensor<2>,
        stored: Option<Tensor<2>>,
        step: &AdamWStep,
        batch: &mut AdamWBatch,
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

/// Updates by [`adamw`] that wait for a common launch. A batch that is dropped without a launch loses its updates.
#[derive(Debug, Default)]
pub struct AdamWBatch {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    pub(crate) waiting: Vec<crate::cube::adamw::Update>,
}

impl AdamWBatch {
    /// Launches the updates that wait. What [`adamw`] gave for them holds from here on.
    pub fn launch(&mut self) {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        crate::cube::adamw::launch(std::mem::take(&mut self.waiting));
    }
}

/// Sums of squares of parts of matrices, whose total is theirs, `[parts]` in f32. `None` if no kernel takes the matrices:
/// one does on NVIDIA GPUs.
pub fn sums_of_squares(matrices: &[Tensor<2>]) -> Option<Tensor<1>> {
    let device = matrices.first()?.device();
    by_device!(&device, cpu => None, cube => crate::cube::multi_tensor::sums_of_squares(matrices))
}

/// Returns true if there is a kernel for [`adamw`] of this parameter. The parameter is `[rows, columns]`.
pub fn has_adamw(value: &Tensor<2>) -> bool {
    by_device!(&value.device(), cpu => false, cube => crate::cube::adamw::takes(value))
}
