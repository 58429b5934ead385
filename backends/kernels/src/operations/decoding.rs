//! Products of a decoding step together with the norm before them, the gate after them, or the residual stream that
//! they are added to. None is differentiable.

use super::{by_device, count_formula, linear_unpadded};
use crate::operations::rows::{glu, glu_joined};
use burn::tensor::Tensor;
use firebrick_spec::Activation;

/// Outputs of a gate that lie side by side in [`joined_gate_up`], before as many of the other factor.
const EIGHT: usize = 8;

/// A norm's weight, `[1, n]`, and its numbers; see [`crate::rms_norm`].
#[derive(Clone, Debug)]
pub struct RmsNorm {
    /// The weight.
    pub weight: Tensor<2>,
    /// What is added to the mean of squares.
    pub eps: f64,
    /// What is added to the weight.
    pub offset: f64,
}

/// Rows, `[rows, n]`, with the sums of their squares by 32 columns, `[rows, n / 32]` in f32: all that a norm needs to
/// know of a row.
#[derive(Clone, Debug)]
pub struct SquaredRows {
    /// The rows.
    pub rows: Tensor<2>,
    /// The sums of squares.
    pub squares: Tensor<2>,
}

/// The matrices of a gated MLP as one for [`linear_glu`], `[2 n, inputs]`: one below the other, or interleaved by eight
/// outputs where a kernel gates as it multiplies. Both are `[n, inputs]`.
pub fn joined_gate_up([gate, up]: [Tensor<2>; 2]) -> Tensor<2> {
    let [n, inner] = gate.dims();
    if !is_interleaved(&gate, n) {
        return Tensor::cat(vec![gate, up], 0);
    }
    let interleaved = [gate, up].map(|matrix| matrix.reshape([n / EIGHT, EIGHT, inner]));
    Tensor::cat(interleaved.to_vec(), 1).reshape([2 * n, inner])
}

/// Returns true if [`joined_gate_up`] of matrices `[n, inputs]` like this one has interleaved outputs.
fn is_interleaved(matrix: &Tensor<2>, n: usize) -> bool {
    by_device!(&matrix.device(), cpu => false, cube => crate::cube::fused_linear::is_interleaved(matrix, n))
}

/// `activation(x · gateᵀ) ∘ (x · upᵀ)`, `[rows, n]`, for `x` of shape `[rows, inputs]` and the matrices
/// [joined](joined_gate_up).
pub fn linear_glu(x: &Tensor<2>, gate_up: &Tensor<2>, activation: Activation) -> Tensor<2> {
    let ([rows, _], [both, _]) = (x.dims(), gate_up.dims());
    let width = both / 2;
    if !is_interleaved(gate_up, width) {
        return glu_joined(&linear_unpadded(x, gate_up), activation);
    }
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if crate::cube::product::takes_plain(x, gate_up) {
        return crate::cube::fused_linear::linear_glu(x, gate_up, activation);
    }
    count_formula();
    let interleaved = x.clone().matmul(gate_up.clone().transpose()).reshape([rows, width / EIGHT, 2, EIGHT]);
    let [gate, up] = [0, 1].map(|which| interleaved.clone().narrow(2, which, 1).reshape([rows, width]));
    glu(gate, up, activation)
}

/// `base + x · Wᵀ`, `[rows, n]`, with the product rounded as it would be stored, and the squares of the sum; `None`
/// where there is no kernel for it, as for many rows.
pub fn linear_residual(base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<SquaredRows> {
    by_device!(&x.device(), cpu => None, cube => crate::cube::fused_linear::linear_residual(base, x, w))
}

/// The sums of the parts of `x · Wᵀ`, `[parts, rows · n]` in f32, where a kernel for many rows divides the inputs and
/// would add them up in a launch of its own; [`crate::add_rms_norm_parts`] adds them up as it reads them.
pub fn linear_parts(x: &Tensor<2>, w: &Tensor<2>) -> Option<Tensor<2>> {
    by_device!(&x.device(), cpu => None, cube => crate::cube::product::linear_parts(x, w))
}

/// `norm(x) · Wᵀ`, `[rows, outputs]`, with the norm rounded as it would be stored; with an activation the gate of a
/// matrix that is [joined](joined_gate_up). `None` where there is no kernel for it.
pub fn rms_norm_linear(x: &SquaredRows, norm: &RmsNorm, w: &Tensor<2>, gate: Option<Activation>) -> Option<Tensor<2>> {
    by_device!(&w.device(), cpu => None, cube => crate::cube::fused_linear::rms_norm_linear(x, norm, w, gate))
}
