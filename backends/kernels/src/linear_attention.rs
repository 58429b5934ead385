//! The operations of gated `DeltaNet` (arXiv:2412.06464): its convolution, its rule and its norm.

use super::delta::{DeltaHeads, SequenceRows};
use super::dispatch::kernels;
use burn::tensor::Tensor;

/// Causal depthwise convolution and `SiLU` within each sequence: `silu(Σₜ w[c, t] · x[row − (taps − 1) + t, c])` of
/// `x`, `[rows, channels]`, and `w`, `[channels, taps]`. Rows in no sequence get zeros.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn causal_convolution(x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Option<Tensor<2>> {
    kernels(&x.device()).causal_convolution(x, w, sequences)
}

/// [`causal_convolution`] of sequences that begin with their last inputs in `pool`, `[slots, (taps − 1) · channels]`,
/// oldest first, where the new last ones go. Gives the result and the pool.
///
/// # Errors
/// Gives the pool back where no kernel is used for the tensors. Not differentiable.
pub fn continue_convolution(
    x: &Tensor<2>,
    w: &Tensor<2>,
    pool: Tensor<2>,
    sequences: &SequenceRows,
) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
    kernels(&x.device()).continue_convolution(x, w, pool, sequences)
}

/// The gated delta rule (arXiv:2412.06464) within each sequence. `qkv` has queries, keys and values side by side,
/// `[rows, channels]`; `g`, the log of the decay, and `beta` are `[rows, value heads]`. All are in f32 or f64; on GPUs
/// in f32, beside which `qkv` may be in f16 or bf16. Queries and keys are divided by their norms, and queries by
/// √`key_dim`. Gives `[rows, value heads · value_dim]` in the type of `g`; rows in no sequence get zeros.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn gated_delta_rule(
    qkv: &Tensor<2>,
    g: &Tensor<2>,
    beta: &Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> Option<Tensor<2>> {
    kernels(&qkv.device()).gated_delta_rule(qkv, g, beta, heads, sequences)
}

/// [`gated_delta_rule`] of sequences that begin with their states in `pool`, `[slots, value heads · key_dim ·
/// value_dim]`, where the new ones go. Gives the result and the pool.
///
/// # Errors
/// Gives the pool back where no kernel is used for the tensors. Not differentiable.
pub fn continue_delta_rule(
    inputs: [&Tensor<2>; 3],
    pool: Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> Result<(Tensor<2>, Tensor<2>), Tensor<2>> {
    kernels(&inputs[0].device()).continue_delta_rule(inputs, pool, heads, sequences)
}

/// The logs of decays, `−e^(A_log) softplus(a + dt_bias)`, for `a` of shape `[rows, heads]` and `decay_log` (`A_log`)
/// and `time_bias` (`dt_bias`) of shape `[1, heads]`: in f32, whatever type they have.
///
/// `None` where no kernel is used for the tensors: the CPU has none.
#[must_use]
pub fn log_decays(a: &Tensor<2>, decay_log: &Tensor<2>, time_bias: &Tensor<2>) -> Option<Tensor<2>> {
    kernels(&a.device()).log_decays(a, decay_log, time_bias)
}

/// `x / √(mean(x²) + eps) · w · silu(z)` for `x` and `z` of shape `[rows, n]` and `w` of shape `[1, n]`, in the type of
/// `z`. All are of one type; on GPUs `x` may be in f32 beside others in half precision.
///
/// `None` where no kernel is used for the tensors.
#[must_use]
pub fn gated_rms_norm(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Option<Tensor<2>> {
    kernels(&x.device()).gated_rms_norm(x, z, w, eps)
}
