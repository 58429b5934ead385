//! Gated `DeltaNet` (Yang et al., 2024, arXiv:2412.06464): a causal convolution over queries, keys and values, and a
//! linear recurrence whose state has a fixed size. Where a device has kernels for them, they compute; elsewhere tensor
//! operations do.

mod convolution;
mod layout;
mod rule;
mod states;

pub(crate) use layout::DeltaLayout;
pub(crate) use states::LayerStates;

use burn::tensor::Tensor;
use burn::tensor::activation::{log_sigmoid, sigmoid, silu};
use firebrick_arch::arch::GatedDeltaNet;
use firebrick_backends::kernels::{self, DeltaHeads};
use firebrick_backends::precision::{stored_as, widened};

/// Heads as kernels take them.
pub(crate) fn heads(delta: &GatedDeltaNet) -> DeltaHeads {
    DeltaHeads {
        keys: delta.num_key_heads,
        values: delta.num_value_heads,
        key_dim: delta.key_head_dim,
        value_dim: delta.value_head_dim,
    }
}

/// The convolution of whole sequences, and `SiLU`: `[rows, channels]`.
pub(crate) fn convolve(x: &Tensor<2>, w: &Tensor<2>, layout: &DeltaLayout) -> Tensor<2> {
    kernels::causal_convolution(x, w, layout.sequences()).unwrap_or_else(|| convolution::whole(x, w, layout.gathers()))
}

/// The gated delta rule over whole sequences: `[rows, value heads · value_dim]` in f32 or wider, as decays and β are.
pub(crate) fn delta_rule([qkv, g, beta]: [&Tensor<2>; 3], heads: DeltaHeads, layout: &DeltaLayout) -> Tensor<2> {
    let kernel = |qkv: &Tensor<2>| kernels::gated_delta_rule(qkv, g, beta, heads, layout.sequences());
    kernel(qkv).unwrap_or_else(|| {
        let wide = widened(qkv.clone());
        let chunked = || rule::chunked([&wide, g, beta], heads, layout.gathers(), None).0;
        kernel(&wide).unwrap_or_else(chunked)
    })
}

/// The logs of decays and β, `[rows, value heads]` each in f32 or wider: `−e^(A_log) softplus(a + dt_bias)` and `σ(b)`.
pub(crate) fn decays(a: Tensor<2>, b: Tensor<2>, decay_log: Tensor<2>, time_bias: Tensor<2>) -> [Tensor<2>; 2] {
    let g = kernels::log_decays(&a, &decay_log, &time_bias).unwrap_or_else(|| {
        let softplus = log_sigmoid((widened(a) + widened(time_bias)).neg());
        widened(decay_log).exp() * softplus
    });
    [g, sigmoid(widened(b))]
}

/// `x / rms(x) · w · silu(z)` of heads, `[rows, n]`, in the type of `z`, for `x` in f32 or wider.
pub(crate) fn gated_norm(x: Tensor<2>, z: Tensor<2>, w: Tensor<2>, eps: f64) -> Tensor<2> {
    kernels::gated_rms_norm(&x, &z, &w, eps).unwrap_or_else(|| {
        let stored = z.dtype();
        let (z, w) = (widened(z), widened(w));
        let y = kernels::gated_rms_norm(&x, &z, &w, eps).unwrap_or_else(|| {
            let mean = (x.clone() * x.clone()).mean_dim(1);
            x * (mean + eps).sqrt().recip() * w * silu(z)
        });
        stored_as(y, stored)
    })
}
