//! Copies of matrices that products with few rows read instead of them, on any backend.

use super::backend::PackedMatrix;
use super::dispatch::kernels;
use burn::tensor::Tensor;
use std::sync::Arc;

/// A copy of a matrix `[outputs, inputs]`, laid out for products with few rows in panels of 32 outputs: as it is, or rounded to
/// 8 bits, so that a product reads a quarter of f32's bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct Panels(Arc<dyn PackedMatrix>);

impl Panels {
    /// A copy of a matrix. `None` where it is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        kernels(&matrix.device()).pack(matrix).map(Self)
    }

    /// A copy of a matrix in 8 bits: each number the nearest of 255 that lie evenly between its output's largest magnitude and its
    /// negative (absmax quantisation a row, as of weights in LLM.int8, arXiv:2208.07339). Sums of products are in f32.
    ///
    /// An output with a number that is not finite gives NaN. `None` where no kernel reads it: of the CPU backend what is not f32,
    /// and whatever has a graph.
    #[must_use]
    pub fn quantise(matrix: &Tensor<2>) -> Option<Self> {
        kernels(&matrix.device()).quantise(matrix).map(Self)
    }

    /// Bytes of the copy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Whether the copy has the matrix's own numbers.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.0.is_exact()
    }

    /// `x · Wᵀ` of `x`, `[rows, inputs]`. `None` where `x` is on another backend, has a graph, or, on the CPU, is not f32.
    ///
    /// On a GPU a product with many rows (more than 64, or 1,024 on tensor cores) widens the whole matrix first, in `x`'s type.
    #[must_use]
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        self.0.linear(x)
    }

    /// The same of several matrices and one `x`; the CPU shares its cores among them.
    #[must_use]
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> Option<[Tensor<2>; N]> {
        let w = w.map(|w| &*w.0);
        let Some((first, others)) = w.split_first() else {
            return Vec::new().try_into().ok();
        };
        first.linear_each(others, x)?.try_into().ok()
    }

    /// `base + x · Wᵀ` in one piece; a GPU does so in the base's place where nobody else holds it. Gives the base back where no
    /// kernel makes it so.
    pub fn linear_onto(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        self.0.linear_onto(base, x)
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` in one piece, of two matrices of one shape. `None` where no kernel makes it so.
    #[must_use]
    pub fn linear_gated(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        gate.0.linear_gated(&*up.0, x)
    }
}
