//! The chain of units of an architecture, and the name and shape of every parameter of a unit.
//!
//! [`unit_specs`] is the only list of parameters, and adapters ([`crate::lora`]) append theirs to the units they belong
//! to. Loading, export, initialisation, gradients, optimizer state and memory estimates follow its order.

mod in_memory;
mod param_spec;
mod slot;
mod target_module;
mod unit;

pub use param_spec::{ExpertOrder, ParamSpec, Stored};
pub use slot::{Slot, TargetModule};
pub use unit::{UnitKind, chain};

use crate::arch::{Arch, ExpertLayout, Experts, Family, HeadKind, Mixer, QkNorm};

/// The parameters of a unit without adapters. A tied head has no projection of its own: it uses the embedding's.
pub fn unit_specs(arch: &Arch, kind: UnitKind) -> Vec<ParamSpec> {
    match kind {
        UnitKind::Embedding => {
            vec![ParamSpec::new(Slot::Embedding, "model.embed_tokens.weight", &[arch.vocab_size, arch.hidden_size])]
        }
        UnitKind::Attention(layer) => match arch.mixers[layer] {
            Mixer::Attention => attention_specs(arch, layer),
            Mixer::GatedDeltaNet => delta_net_specs(arch, layer),
        },
        UnitKind::Mlp(layer) => mlp_specs(arch, layer),
        UnitKind::Head => head_specs(arch),
    }
}

fn attention_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let (d, hd) = (arch.hidden_size, arch.head_dim);
    let (q, kv) = (arch.num_heads * hd, arch.num_kv_heads * hd);
    let spec = |slot, name: &str, width: usize| ParamSpec::new(slot, format!("model.layers.{layer}.{name}"), &[width]);
    let matrix = |slot, name: &str, shape: [usize; 2]| {
        ParamSpec::new(slot, format!("model.layers.{layer}.self_attn.{name}.weight"), &shape)
    };
    // a gate lies beside each query head
    let wide = if arch.attention_gate { 2 * q } else { q };
    let mut specs = Vec::new();
    if arch.pre_norms {
        specs.push(spec(Slot::InputNorm, "input_layernorm.weight", d));
    }
    specs.extend([
        matrix(Slot::Q, "q_proj", [wide, d]),
        matrix(Slot::K, "k_proj", [kv, d]),
        matrix(Slot::V, "v_proj", [kv, d]),
        matrix(Slot::O, "o_proj", [d, q]),
    ]);
    if arch.qkv_bias {
        specs.extend([
            spec(Slot::QBias, "self_attn.q_proj.bias", wide),
            spec(Slot::KBias, "self_attn.k_proj.bias", kv),
            spec(Slot::VBias, "self_attn.v_proj.bias", kv),
        ]);
    }
    if arch.o_bias {
        specs.push(spec(Slot::OBias, "self_attn.o_proj.bias", d));
    }
    if arch.attention_sinks {
        specs.push(spec(Slot::Sinks, "self_attn.sinks", arch.num_heads));
    }
    if let Some(over) = arch.qk_norm {
        let [q, k] = match over {
            QkNorm::Heads => [hd, hd],
            QkNorm::Projection => [q, kv],
        };
        specs
            .extend([spec(Slot::QNorm, "self_attn.q_norm.weight", q), spec(Slot::KNorm, "self_attn.k_norm.weight", k)]);
    }
    if arch.post_norms {
        specs.push(spec(Slot::PostNorm, "post_attention_layernorm.weight", d));
    }
    specs
}

fn delta_net_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let Some(delta) = arch.delta_net else {
        unreachable!("a layer of an architecture that has such layers");
    };
    let p = format!("model.layers.{layer}");
    let (d, values, heads) = (arch.hidden_size, delta.value_dim(), delta.num_value_heads);
    let channels = delta.channels();
    let spec = |slot, name: &str, shape: &[usize]| ParamSpec::new(slot, format!("{p}.linear_attn.{name}"), shape);
    let norm = format!("{p}.input_layernorm.weight");
    vec![
        ParamSpec::new(Slot::InputNorm, norm, &[d]),
        spec(Slot::DeltaQkv, "in_proj_qkv.weight", &[channels, d]),
        spec(Slot::DeltaZ, "in_proj_z.weight", &[values, d]),
        spec(Slot::DeltaB, "in_proj_b.weight", &[heads, d]),
        spec(Slot::DeltaA, "in_proj_a.weight", &[heads, d]),
        spec(Slot::Convolution, "conv1d.weight", &[channels, 1, delta.conv_kernel_dim]),
        spec(Slot::TimeBias, "dt_bias", &[heads]),
        spec(Slot::DecayLog, "A_log", &[heads]),
        spec(Slot::DeltaNorm, "norm.weight", &[delta.value_head_dim]),
        spec(Slot::DeltaOut, "out_proj.weight", &[d, values]),
    ]
}

fn mlp_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let p = format!("model.layers.{layer}");
    let d = arch.hidden_size;
    // where there are norms after the halves, one of them has the name that the norm before the MLP has elsewhere
    let norm = if arch.post_norms { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
    let mut specs = Vec::new();
    if arch.pre_norms {
        specs.push(ParamSpec::new(Slot::InputNorm, format!("{p}.{norm}.weight"), &[d]));
    }
    specs.extend(match arch.experts(layer) {
        None => dense_specs(arch, arch.intermediate_size, &format!("{p}.mlp")),
        Some(experts) => expert_specs(arch, experts, &format!("{p}.mlp")),
    });
    if arch.post_norms {
        specs.push(ParamSpec::new(Slot::PostNorm, format!("{p}.post_feedforward_layernorm.weight"), &[d]));
    }
    specs
}

/// The matrices of a gated MLP of width `ff` in the module `p`, and their biases.
fn dense_specs(arch: &Arch, ff: usize, p: &str) -> Vec<ParamSpec> {
    let d = arch.hidden_size;
    let mut specs = vec![
        ParamSpec::new(Slot::Gate, format!("{p}.gate_proj.weight"), &[ff, d]),
        ParamSpec::new(Slot::Up, format!("{p}.up_proj.weight"), &[ff, d]),
        ParamSpec::new(Slot::Down, format!("{p}.down_proj.weight"), &[d, ff]),
    ];
    if arch.mlp_bias {
        specs.extend([
            ParamSpec::new(Slot::GateBias, format!("{p}.gate_proj.bias"), &[ff]),
            ParamSpec::new(Slot::UpBias, format!("{p}.up_proj.bias"), &[ff]),
            ParamSpec::new(Slot::DownBias, format!("{p}.down_proj.bias"), &[d]),
        ]);
    }
    specs
}

/// The router, the matrices of the experts, and the expert of all tokens, in the module `p`.
fn expert_specs(arch: &Arch, experts: Experts, p: &str) -> Vec<ParamSpec> {
    let (count, ff, d) = (experts.count, experts.intermediate_size, arch.hidden_size);
    let each = |slot, module: &str, shape| {
        let name = format!("{p}.experts.*.{module}.weight");
        ParamSpec::of_experts(slot, name, count, shape)
    };
    let stacked = |slot, module: &str, [out, input]: [usize; 2]| {
        let name = format!("{p}.experts.{module}");
        match experts.layout {
            ExpertLayout::Interleaved => {
                ParamSpec::transposed_experts(slot, name, [count, out, input], slot == Slot::ExpertGateUp)
            }
            _ => ParamSpec::new(slot, name, &[count, out, input]),
        }
    };
    let module = match arch.family {
        Family::GptOss => "router",
        _ => "gate",
    };
    let name = |part: &str| format!("{p}.{module}.{part}");
    let mut specs = vec![ParamSpec::new(Slot::Router, name("weight"), &[count, d])];
    if experts.bias {
        specs.push(ParamSpec::new(Slot::RouterBias, name("bias"), &[count]));
    }
    if experts.layout.is_joined() {
        specs.extend([
            stacked(Slot::ExpertGateUp, "gate_up_proj", [2 * ff, d]),
            stacked(Slot::ExpertDown, "down_proj", [d, ff]),
        ]);
    } else {
        specs.extend([
            each(Slot::ExpertGate, "gate_proj", [ff, d]),
            each(Slot::ExpertUp, "up_proj", [ff, d]),
            each(Slot::ExpertDown, "down_proj", [d, ff]),
        ]);
    }
    if experts.bias {
        let interleaved = experts.layout == ExpertLayout::Interleaved;
        let bias = |slot, module: &str, width, interleaved| {
            let name = format!("{p}.experts.{module}_bias");
            ParamSpec::expert_bias(slot, name, [count, width], interleaved)
        };
        specs.extend([
            bias(Slot::ExpertGateUpBias, "gate_up_proj", 2 * ff, interleaved),
            bias(Slot::ExpertDownBias, "down_proj", d, false),
        ]);
    }
    if let Some(width) = experts.shared {
        specs.extend(dense_specs(arch, width, &format!("{p}.shared_expert")));
        specs.push(ParamSpec::new(Slot::SharedGate, format!("{p}.shared_expert_gate.weight"), &[1, d]));
    }
    specs
}

fn head_specs(arch: &Arch) -> Vec<ParamSpec> {
    let d = arch.hidden_size;
    let mut specs = vec![ParamSpec::new(Slot::InputNorm, "model.norm.weight", &[d])];
    match arch.head {
        HeadKind::LanguageModel if arch.tied => {}
        HeadKind::LanguageModel => {
            specs.push(ParamSpec::new(Slot::Projection, "lm_head.weight", &[arch.vocab_size, d]));
        }
        HeadKind::Scalar { bias } => {
            specs.push(ParamSpec::new(Slot::Projection, "score.weight", &[1, d]));
            if bias {
                specs.push(ParamSpec::new(Slot::ProjectionBias, "score.bias", &[1]));
            }
        }
    }
    if arch.joint_value_head {
        specs.push(ParamSpec::new(Slot::Value, "v_head.weight", &[1, d]));
    }
    specs
}

#[cfg(test)]
mod tests;
