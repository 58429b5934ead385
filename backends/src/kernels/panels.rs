//! Copies of matrices that products with few rows read instead of them, on any backend.

use super::{cpu, cube};
use burn::tensor::Tensor;

/// A copy of a matrix `[outputs, inputs]`, laid out for products with few rows in panels of 32 outputs: as it is, or rounded to
/// 8 bits, so that a product reads a quarter of f32's bytes. Clones share it.
#[derive(Clone, Debug)]
pub struct Panels(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Cpu(cpu::panels::Panels),
    Gpu(cube::panels::Codes),
}

impl Panels {
    /// A copy of a matrix. `None` where it is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        cpu::panels::Panels::pack(matrix).map(|own| Self(Kind::Cpu(own)))
    }

    /// A copy of a matrix in 8 bits: each number the nearest of 255 that lie evenly between its output's largest magnitude and its
    /// negative (absmax quantisation a row, as of weights in LLM.int8, arXiv:2208.07339). Sums of products are in f32.
    ///
    /// An output with a number that is not finite gives NaN. `None` where no kernel reads it: of the CPU backend what is not f32,
    /// and whatever has a graph.
    #[must_use]
    pub fn quantise(matrix: &Tensor<2>) -> Option<Self> {
        let on_cpu = cpu::panels::Panels::quantise(matrix).map(Kind::Cpu);
        on_cpu
            .or_else(|| cube::panels::Codes::quantise(matrix).map(Kind::Gpu))
            .map(Self)
    }

    /// Bytes of the copy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Kind::Cpu(own) => own.bytes(),
            Kind::Gpu(own) => own.bytes(),
        }
    }

    /// `x · Wᵀ` of `x`, `[rows, inputs]`. `None` where `x` is on another backend, has a graph, or, on the CPU, is not f32.
    ///
    /// On a GPU a product with many rows (more than 64, or 1,024 on tensor cores) widens the whole matrix first, in `x`'s type.
    #[must_use]
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        match &self.0 {
            Kind::Cpu(own) => own.linear(x),
            Kind::Gpu(own) => own.linear(x),
        }
    }

    /// The same of several matrices and one `x`.
    #[must_use]
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> Option<[Tensor<2>; N]> {
        match all(w.map(Self::on_cpu)) {
            Some(w) => cpu::panels::Panels::linear_each(x, w),
            None => all(w.map(|w| w.linear(x))),
        }
    }

    /// `base + x · Wᵀ` in one piece; a GPU does so in the base's place where nobody else holds it. Gives the base back where no
    /// kernel makes it so.
    pub fn linear_onto(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        match &self.0 {
            Kind::Cpu(own) => own.linear_onto(&base, x).ok_or(base),
            Kind::Gpu(own) => own.linear_onto(base, x),
        }
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` in one piece, of two matrices of one shape. `None` where no kernel makes it so.
    #[must_use]
    pub fn linear_gated(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        match (&gate.0, &up.0) {
            (Kind::Cpu(gate), Kind::Cpu(up)) => cpu::panels::Panels::linear_gated(gate, up, x),
            (Kind::Gpu(gate), Kind::Gpu(up)) => cube::panels::Codes::linear_gated(gate, up, x),
            _ => None,
        }
    }

    /// Whether the copy has the matrix's own numbers.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.on_cpu().is_some_and(cpu::panels::Panels::is_exact)
    }

    fn on_cpu(&self) -> Option<&cpu::panels::Panels> {
        match &self.0 {
            Kind::Cpu(own) => Some(own),
            Kind::Gpu(_) => None,
        }
    }
}

/// All of them, or none.
fn all<T, const N: usize>(each: [Option<T>; N]) -> Option<[T; N]> {
    let all: Option<Vec<T>> = each.into_iter().collect();
    all?.try_into().ok()
}
