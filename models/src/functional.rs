//! Operations that units and heads share, with a kernel where the device has one and tensor operations elsewhere.

use crate::arch::{Activation, Arch};
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu, gelu_approximate, silu};
use firebrick_backends::kernels::{self, Gate};
use firebrick_backends::precision::{stored_as, widened};

/// `x · Wᵀ`, `[rows, out]`, for `x` of shape `[rows, in]` and `w` of shape `[out, in]`.
pub(crate) fn linear(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    kernels::linear(x, w).unwrap_or_else(|| x.clone().matmul(w.clone().transpose()))
}

/// `x / rms(x) · w` over the last dimension (Zhang & Sennrich, 2019, arXiv:1910.07467), for `w` of shape `[1, n]`;
/// computed in f32 or wider, stored as `x` is.
pub(crate) fn rms_norm(arch: &Arch, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let offset = norm_offset(arch);
    if let Some(y) = kernels::rms_norm(&x, &weight, arch.norm_eps, offset) {
        return y;
    }
    let stored = x.dtype();
    let (x, weight) = (widened(x), widened(weight));
    let weight = if arch.norm_offset { weight + 1.0 } else { weight };
    let mean = (x.clone() * x.clone()).mean_dim(1);
    stored_as(x * (mean + arch.norm_eps).sqrt().recip() * weight, stored)
}

/// `residual + rms_norm(y)`.
pub(crate) fn rms_norm_onto(arch: &Arch, residual: Tensor<2>, y: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    kernels::rms_norm_add(residual, &y, &weight, arch.norm_eps, norm_offset(arch))
        .unwrap_or_else(|residual| residual + rms_norm(arch, y, weight))
}

/// `base + x` and its norm.
pub(crate) fn add_rms_norm(arch: &Arch, base: Tensor<2>, x: &Tensor<2>, weight: Tensor<2>) -> [Tensor<2>; 2] {
    let normed = kernels::add_rms_norm(base, x, &weight, arch.norm_eps, norm_offset(arch));
    normed.unwrap_or_else(|base| {
        let sum = base + x.clone();
        [sum.clone(), rms_norm(arch, sum, weight)]
    })
}

/// What is added to a stored norm weight.
pub(crate) fn norm_offset(arch: &Arch) -> f64 {
    if arch.norm_offset { 1.0 } else { 0.0 }
}

/// `act(gate) ∘ up`.
pub(crate) fn glu(arch: &Arch, gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    kernels::glu(activation(arch), &gate, &up).unwrap_or_else(|| match arch.activation {
        Activation::Silu => silu(gate) * up,
        Activation::GeluTanh => gelu_approximate(gate) * up,
        Activation::Gelu => gelu(gate) * up,
    })
}

/// The gate's non-linearity, as kernels name it.
pub(crate) fn activation(arch: &Arch) -> Gate {
    match arch.activation {
        Activation::Silu => Gate::Silu,
        Activation::Gelu => Gate::Gelu,
        Activation::GeluTanh => Gate::GeluTanh,
    }
}
