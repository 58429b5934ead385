//! The gated `DeltaNet` half of a layer on packed rows `[tokens, hidden]`.

use super::{add_to_residual, normed_input};
use crate::adapter::LoraForward;
use crate::arch::Arch;
use crate::delta_net::{self, DeltaLayout, LayerStates};
use crate::unit::Slot;
use crate::weights::Weights;
use burn::tensor::Tensor;

/// Norm, projections, convolution, delta rule, gated norm, output projection, residual. With states, sequences continue
/// from theirs.
pub(crate) fn delta_net(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    layout: &DeltaLayout,
    lora: Option<LoraForward<'_>>,
    mut states: Option<&mut LayerStates>,
) -> Tensor<2> {
    let Some(shape) = &arch.delta_net else {
        unreachable!("an architecture with such layers has their shape");
    };
    let h = normed_input(arch, w, x.clone());
    let projections = [Slot::DeltaQkv, Slot::DeltaZ, Slot::DeltaA, Slot::DeltaB];
    let [qkv, z, a, b] = w.linear_each(&h, projections, lora);
    let taps = w.need(Slot::Convolution);
    let qkv = match &mut states {
        Some(states) => states.convolve(&qkv, &taps, layout),
        None => delta_net::convolve(&qkv, &taps, layout),
    };
    let (decay_log, time_bias) = (w.need(Slot::DecayLog), w.need(Slot::TimeBias));
    let [g, beta] = delta_net::decays(a, b, decay_log, time_bias);
    let (inputs, heads) = ([&qkv, &g, &beta], delta_net::heads(shape));
    let mixed = match states {
        Some(states) => states.delta_rule(inputs, heads, layout),
        None => delta_net::delta_rule(inputs, heads, layout),
    };
    let [tokens, width] = mixed.dims();
    let rows = [tokens * heads.values, heads.value_dim];
    let (mixed, z) = (mixed.reshape(rows), z.reshape(rows));
    let mixed = delta_net::gated_norm(mixed, z, w.need(Slot::DeltaNorm), arch.norm_eps);
    let mixed = mixed.reshape([tokens, width]);
    add_to_residual(arch, w, x, &mixed, Slot::DeltaOut, lora)
}
