//! The parameters of a gated `DeltaNet` layer.

use super::{ParamSpec, Slot};
use crate::arch::Arch;

/// Those of a layer with that mixer.
pub(super) fn specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let Some(delta) = arch.delta_net else {
        unreachable!("a layer of an architecture that has such layers");
    };
    let p = format!("model.layers.{layer}");
    let (d, values, heads) = (arch.hidden_size, delta.value_dim(), delta.num_value_heads);
    let channels = delta.channels();
    let own = |slot, name: &str, shape: &[usize]| {
        ParamSpec::new(slot, format!("{p}.linear_attn.{name}"), shape)
    };
    let norm = format!("{p}.input_layernorm.weight");
    vec![
        ParamSpec::new(Slot::InputNorm, norm, &[d]),
        own(Slot::DeltaQkv, "in_proj_qkv.weight", &[channels, d]),
        own(Slot::DeltaZ, "in_proj_z.weight", &[values, d]),
        own(Slot::DeltaB, "in_proj_b.weight", &[heads, d]),
        own(Slot::DeltaA, "in_proj_a.weight", &[heads, d]),
        own(
            Slot::Convolution,
            "conv1d.weight",
            &[channels, 1, delta.conv_kernel_dim],
        ),
        own(Slot::TimeBias, "dt_bias", &[heads]),
        own(Slot::DecayLog, "A_log", &[heads]),
        own(Slot::DeltaNorm, "norm.weight", &[delta.value_head_dim]),
        own(Slot::DeltaOut, "out_proj.weight", &[d, values]),
    ]
}
