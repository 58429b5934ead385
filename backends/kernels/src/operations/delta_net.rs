//! Gated `DeltaNet` (arXiv:2412.06464): its convolution, its rule and its norm.

use super::operations;
use crate::delta::{DeltaHeads, SequenceRows};
use crate::formulas::{convolution, delta_rule};
use burn::tensor::Tensor;
use burn::tensor::activation::{log_sigmoid, silu};
use firebrick_device::precision::{stored_as, widened};

operations! {
    /// Causal depthwise convolution and `SiLU` within each sequence: `silu(Σₜ w[c, t] · x[row − (taps − 1) + t, c])` of
    /// `x`, `[rows, channels]`, and `w`, `[channels, taps]`. Rows in no sequence get zeros.
    pub fn causal_convolution(x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Tensor<2> {
        cpu: convolution if alike(&[x, w]);
        cube: convolution if cube::convolution::takes(&[x, w], sequences);
        else { convolution::whole(x, w, sequences) }
    }

    /// [`causal_convolution`] of sequences that begin with their last inputs in `pool`, `[slots, (taps − 1) ·
    /// channels]`, oldest first, where the new last ones go. Gives the result and the pool. Not differentiable.
    pub fn continue_convolution(
        x: &Tensor<2>,
        w: &Tensor<2>,
        pool: Tensor<2>,
        sequences: &SequenceRows,
    ) -> (Tensor<2>, Tensor<2>) {
        cpu: convolution if plain(&[x, w, &pool]);
        cube: convolution if cube::convolution::takes(&[x, w, &pool], sequences)
            && plain(Operation::DeltaNet, &[x, w, &pool]);
        else { convolution::continued(x, w, pool, sequences) }
    }

    /// The gated delta rule (arXiv:2412.06464) within each sequence. Of the inputs `qkv` has queries, keys and values
    /// side by side, `[rows, channels]`; `g`, the log of the decay, and `beta` are `[rows, value heads]` in f32 or wider. Queries and
    /// keys are divided by their norms, and queries by √`key_dim`. Gives `[rows, value heads · value_dim]` in the type
    /// of `g`; rows in no sequence get zeros.
    pub fn gated_delta_rule(inputs: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> Tensor<2> {
        cpu: delta_rule if alike(&inputs) && is_full_precision(inputs[0]);
        cube: delta_rule if cube::delta_rule::takes(inputs, heads, sequences);
        else {
            let [qkv, g, beta] = inputs;
            let wide = widened(qkv.clone());
            if wide.dtype() == qkv.dtype() {
                delta_rule::whole([&wide, g, beta], heads, sequences)
            } else {
                gated_delta_rule([&wide, g, beta], heads, sequences)
            }
        }
    }

    /// [`gated_delta_rule`] of sequences that begin with their states in `pool`, `[slots, value heads · key_dim ·
    /// value_dim]`, where the new ones go. Gives the result and the pool. Not differentiable.
    pub fn continue_delta_rule(
        inputs: [&Tensor<2>; 3],
        pool: Tensor<2>,
        heads: DeltaHeads,
        sequences: &SequenceRows,
    ) -> (Tensor<2>, Tensor<2>) {
        cpu: delta_rule if plain(&[inputs[0], inputs[1], inputs[2], &pool]);
        cube: delta_rule if cube::delta_rule::continues(inputs, &pool, heads, sequences);
        else {
            let [qkv, g, beta] = inputs;
            let wide = widened(qkv.clone());
            if wide.dtype() == qkv.dtype() {
                delta_rule::continued([&wide, g, beta], pool, heads, sequences)
            } else {
                continue_delta_rule([&wide, g, beta], pool, heads, sequences)
            }
        }
    }

    /// The logs of decays, `−e^(A_log) softplus(a + dt_bias)`, for `a` of shape `[rows, heads]` and `decay_log`
    /// (`A_log`) and `time_bias` (`dt_bias`) of shape `[1, heads]`: in f32 or wider.
    pub fn log_decays(a: &Tensor<2>, decay_log: &Tensor<2>, time_bias: &Tensor<2>) -> Tensor<2> {
        cube: decays if alike(Operation::DeltaNet, &[a, decay_log, time_bias]);
        else {
            let softplus = log_sigmoid((widened(a.clone()) + widened(time_bias.clone())).neg());
            widened(decay_log.clone()).exp() * softplus
        }
    }

    /// `x / √(mean(x²) + eps) · w · silu(z)` for `x` and `z` of shape `[rows, n]` and `w` of shape `[1, n]`, in the
    /// type of `z`. `x` may be in f32 or wider beside others in half precision.
    pub fn gated_rms_norm(x: &Tensor<2>, z: &Tensor<2>, w: &Tensor<2>, eps: f64) -> Tensor<2> {
        cpu: gated_norm if alike(&[x, z, w]);
        cube: gated_norm if cube::gated_norm::takes(x, z, w);
        else {
            let stored = z.dtype();
            let (z, w) = (widened(z.clone()), widened(w.clone()));
            if z.dtype() != stored {
                return stored_as(gated_rms_norm(x, &z, &w, eps), stored);
            }
            let mean = (x.clone() * x.clone()).mean_dim(1);
            x.clone() * (mean + eps).sqrt().recip() * w * silu(z)
        }
    }
}
