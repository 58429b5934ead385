//! Copies of matrices that products with few rows read instead of them, on any backend.

use super::backend::PackedMatrix;
use super::cpu::PanelMatrix;
use super::operations::rows::glu;
use super::operations::{by_device, count_formula};
use burn::tensor::Tensor;
use firebrick_spec::Activation;
use std::sync::Arc;

/// A copy of weights `[outputs, inputs]` in the layout of kernels for products with few rows (panels of 32 outputs):
/// exact, or quantised to 8 bits, so that a product reads a quarter of f32's bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct PackedWeights(Arc<dyn PackedMatrix>);

impl PackedWeights {
    /// An exact copy. `None` for tensors other than the CPU backend's f32 without autodiff. The matrix is `[outputs,
    /// inputs]`.
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        by_device!(&matrix.device(), cpu => Some(Self(Arc::new(PanelMatrix::pack(matrix)?))), cube => None)
    }

    /// An 8-bit copy: each value is rounded to the nearest of 255 evenly spaced ones between plus and minus the largest
    /// magnitude of its output (row-wise absmax quantisation, as of weights in LLM.int8, arXiv:2208.07339). Products
    /// are accumulated in f32.
    ///
    /// An output with a value that is not finite gives NaN. `None` where there is no kernel: for tensors with autodiff,
    /// and on the CPU for types other than f32. The matrix is `[outputs, inputs]`.
    pub fn quantize(matrix: &Tensor<2>) -> Option<Self> {
        by_device!(
            &matrix.device(),
            cpu => Some(Self(Arc::new(PanelMatrix::quantize(matrix)?))),
            cube => Some(Self(Arc::new(crate::cube::QuantizedMatrix::quantize(matrix)?))),
        )
    }

    /// Bytes of the copy.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Returns true if the copy is exact.
    pub fn is_exact(&self) -> bool {
        self.0.is_exact()
    }

    /// Returns true if products with these rows, `[rows, inputs]`, read the copy: rows on its device without autodiff,
    /// on the CPU in f32.
    pub fn takes(&self, x: &Tensor<2>) -> bool {
        self.0.takes(x)
    }

    /// `x · Wᵀ` for `x` of shape `[rows, inputs]` that the copy [takes](Self::takes).
    ///
    /// On a GPU a product with many rows (see [`firebrick_spec::QuantizedProduct`]) widens the whole matrix to `x`'s
    /// type first.
    pub fn linear(&self, x: &Tensor<2>) -> Tensor<2> {
        self.0.linear(x)
    }

    /// [`Self::linear`] of several matrices and one `x`, on the CPU in one parallel loop. `x` is `[rows, inputs]`, each
    /// result `[rows, outputs]`.
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> [Tensor<2>; N] {
        let matrices = w.map(|w| &*w.0);
        let products = matrices.split_first().map_or_else(Vec::new, |(first, others)| first.linear_each(others, x));
        products.try_into().unwrap_or_else(|_| unreachable!("one each"))
    }

    /// `base + x · Wᵀ` for `x` of shape `[rows, inputs]` that the copy [takes](Self::takes); on a GPU in place where
    /// `base`, `[rows, outputs]`, is not shared.
    pub fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Tensor<2> {
        let alike = base.dtype() == x.dtype() && !base.device().is_autodiff();
        if alike && self.0.fuses(x) {
            return self.0.linear_add(base, x);
        }
        count_formula();
        base + self.linear(x)
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` for two matrices of one shape and `x` of shape `[rows, inputs]` that the copies
    /// [take](Self::takes): `[rows, outputs]`.
    pub fn linear_swiglu(gate: &Self, up: &Self, x: &Tensor<2>) -> Tensor<2> {
        if gate.0.fuses(x) {
            return gate.0.linear_swiglu(&*up.0, x);
        }
        count_formula();
        let [gate, up] = Self::linear_each(x, [gate, up]);
        glu(gate, up, Activation::Silu)
    }
}
