//! A mixture of experts: products with the matrix of each row's expert, and what surrounds them.

use super::{on_backend, operations};
use crate::experts;
use burn::tensor::Tensor;
use firebrick_metadata::experts::{ExpertInput, ExpertRows};

operations! {
    /// `x · Wᵀ` with the matrix of each row's expert: sorted rows, `[choices, outputs]`, for `w` of shape `[experts ·
    /// outputs, inputs]`, and `x` of shape `[tokens, inputs]` or, sorted, `[choices, inputs]`.
    ///
    /// `w` must be a leaf of the autodiff graph or a constant. With a constant `w` nothing of `x` is saved, since no
    /// gradient needs it.
    pub fn expert_linear(x: &Tensor<2>, w: &Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
        cpu: experts if alike(&[x, w]);
        else { on_backend!(&x.device(), experts::linear(x, w, rows, reads)) }
    }

    /// Sorted rows `y`, `[choices, outputs]`, plus the bias of each row's expert, of `[experts, outputs]`.
    pub fn expert_bias(y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        else { on_backend!(&y.device(), crate::expert_bias::add(y, bias, rows)) }
    }

    /// `(up + 1) · gate · σ(1.702 gate)` of rows `[gate | up]`, where `gate ≤ limit` and `|up| ≤ limit` (gpt-oss):
    /// `[rows, n]` for `x` of shape `[rows, 2 n]`. Nothing but `x` is kept for the backward pass.
    pub fn clamped_swiglu(x: &Tensor<2>, limit: f64) -> Tensor<2> {
        cpu: glu if alike(&[x]);
        else { on_backend!(&x.device(), crate::clamped_swiglu::clamped_swiglu(x, limit)) }
    }

    /// The sum of each token's rows of `y`, sorted, `[choices, n]`, by its `weights`, `[tokens, choices of a token]`:
    /// `[tokens, n]`.
    pub fn combine_experts(y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
        cpu: experts if alike(&[y, weights]);
        else { on_backend!(&y.device(), experts::combine(y, weights, rows)) }
    }

    /// `y`, whose backward pass adds `gradient`, a constant of the shape of `x`, to the gradient of `x`: a loss of its
    /// own that is added to whatever is made of `y`.
    pub fn attach_gradient(y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
        else { on_backend!(&y.device(), experts::attach(y, x, gradient)) }
    }
}
