//! Copies of matrices that products with few rows read instead of them, on any backend.

use super::backend::PackedMatrix;
use super::dispatch::kernels;
use burn::tensor::Tensor;
use std::sync::Arc;

/// A copy of weights `[outputs, inputs]` in the layout of kernels for products with few rows (panels of 32 outputs):
/// exact, or quantised to 8 bits, so that a product reads a quarter of f32's bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct PackedWeights(Arc<dyn PackedMatrix>);

impl PackedWeights {
    /// An exact copy. `None` for tensors other than the CPU backend's f32 without autodiff. The matrix is `[outputs,
    /// inputs]`.
    #[must_use]
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        kernels(&matrix.device()).pack(matrix).map(Self)
    }

    /// An 8-bit copy: each value is rounded to the nearest of 255 evenly spaced ones between plus and minus the largest
    /// magnitude of its output (row-wise absmax quantisation, as of weights in LLM.int8, arXiv:2208.07339). Products
    /// are accumulated in f32.
    ///
    /// An output with a value that is not finite gives NaN. `None` where there is no kernel: for tensors with autodiff,
    /// and on the CPU for types other than f32. The matrix is `[outputs, inputs]`.
    #[must_use]
    pub fn quantize(matrix: &Tensor<2>) -> Option<Self> {
        kernels(&matrix.device()).quantize(matrix).map(Self)
    }

    /// Bytes of the copy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Whether the copy is exact.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.0.is_exact()
    }

    /// `x · Wᵀ` for `x` of shape `[rows, inputs]`. `None` where `x` is on another backend, has autodiff, or, on the
    /// CPU, is not f32.
    ///
    /// On a GPU a product with many rows (see [`firebrick_spec::QuantizedProduct`]) widens the whole matrix to `x`'s
    /// type first.
    #[must_use]
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        self.0.linear(x)
    }

    /// [`Self::linear`] of several matrices and one `x`, on the CPU in one parallel loop. `x` is `[rows, inputs]`, each
    /// result `[rows, outputs]`.
    #[must_use]
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> Option<[Tensor<2>; N]> {
        let w = w.map(|w| &*w.0);
        let Some((first, others)) = w.split_first() else {
            return Vec::new().try_into().ok();
        };
        first.linear_each(others, x)?.try_into().ok()
    }

    /// `base + x · Wᵀ` in one kernel, for `x` of shape `[rows, inputs]`; on a GPU in place where `base`, `[rows,
    /// outputs]`, is not shared.
    ///
    /// # Errors
    /// `base` itself, where there is no such kernel.
    pub fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        self.0.linear_add(base, x)
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` in one kernel, for two matrices of one shape. `None` where there is no such
    /// kernel. `x` is `[rows, inputs]`, the result `[rows, outputs]`.
    #[must_use]
    pub fn linear_swiglu(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        gate.0.linear_swiglu(&*up.0, x)
    }
}
