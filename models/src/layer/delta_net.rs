//! The gated `DeltaNet` half of a layer on packed rows `[tokens, hidden]`.

use super::Sublayer;
use crate::delta_net::{self, LayerStates};
use crate::unit::Slot;
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use firebrick_backends::kernels::{self, SequenceRows};
use firebrick_backends::precision::widened;

impl Sublayer<'_> {
    /// Norm, projections, convolution, delta rule, gated norm, output projection, residual. With states, sequences
    /// continue from theirs.
    pub fn delta_net(&self, x: Tensor<2>, sequences: &SequenceRows, mut states: Option<&mut LayerStates>) -> Tensor<2> {
        let Self { arch, w, .. } = self;
        let Some(shape) = &arch.delta_net else {
            unreachable!("an architecture with such layers has their shape");
        };
        let [h, x] = self.normed_residual(x);
        let projections = [Slot::DeltaQkv, Slot::DeltaZ, Slot::DeltaA, Slot::DeltaB];
        let [qkv, z, a, b] = w.linear_each(&h, projections, self.lora);
        let taps = w.need(Slot::Convolution);
        let qkv = match &mut states {
            Some(states) => states.convolve(&qkv, &taps, sequences),
            None => kernels::causal_convolution(&qkv, &taps, sequences),
        };
        let g = kernels::log_decays(&a, &w.need(Slot::DecayLog), &w.need(Slot::TimeBias));
        let beta = sigmoid(widened(b));
        let heads = delta_net::heads(shape);
        let mixed = match states {
            Some(states) => states.delta_rule([&qkv, &g, &beta], heads, sequences),
            None => kernels::gated_delta_rule([&qkv, &g, &beta], heads, sequences),
        };
        let [tokens, width] = mixed.dims();
        let rows = [tokens * heads.values, heads.value_dim];
        let norm = w.need(Slot::DeltaNorm);
        // what is normed goes before the next product
        let mixed = kernels::gated_rms_norm(&mixed.reshape(rows), &z.reshape(rows), &norm, arch.norm_eps);
        let mixed = mixed.reshape([tokens, width]);
        self.add_to_residual(x, &mixed, Slot::DeltaOut)
    }
}
