//! The chain of units of an architecture, and the name and shape of every parameter of a unit.
//!
//! [`unit_specs`] is the only list of parameters, and adapters ([`crate::lora`]) append theirs to the units they belong to. Loading,
//! export, initialisation, gradients, optimizer state and memory estimates follow its order.

mod in_memory;
mod target_module;
mod unit;

pub use unit::{UnitKind, chain};

use crate::arch::{Arch, Experts, HeadKind, Mixer, QkNorm};

/// The role of a parameter in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(
    missing_docs,
    reason = "the variants are the field's own names for these matrices"
)]
pub enum Slot {
    Embedding,
    InputNorm,
    Q,
    K,
    V,
    O,
    QBias,
    KBias,
    VBias,
    OBias,
    QNorm,
    KNorm,
    DeltaQkv,
    DeltaZ,
    DeltaA,
    DeltaB,
    DeltaOut,
    Convolution,
    DecayLog,
    TimeBias,
    DeltaNorm,
    PostNorm,
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
    /// The router of experts, `[experts, hidden]`.
    Router,
    /// One expert below the other: `[experts · width, hidden]`.
    ExpertGate,
    /// As [`Self::ExpertGate`].
    ExpertUp,
    /// One expert below the other, of each the gate's rows and then those of up: `[experts · 2 width, hidden]`, in place of
    /// [`Self::ExpertGate`] and [`Self::ExpertUp`] where a checkpoint has them so.
    ExpertGateUp,
    /// One expert below the other: `[experts · hidden, width]`.
    ExpertDown,
    /// The gate of the expert that every token goes through, `[1, hidden]`; its matrices are those of a dense MLP.
    SharedGate,
    Projection,
    ProjectionBias,
    Value,
    LoraA(TargetModule),
    LoraB(TargetModule),
}

impl Slot {
    /// The bias that is added to the product with this matrix; `None` where no architecture has one.
    #[must_use]
    pub fn bias(self) -> Option<Self> {
        Some(match self {
            Self::Q => Self::QBias,
            Self::K => Self::KBias,
            Self::V => Self::VBias,
            Self::O => Self::OBias,
            Self::Gate => Self::GateBias,
            Self::Up => Self::UpBias,
            Self::Down => Self::DownBias,
            Self::Projection => Self::ProjectionBias,
            _ => return None,
        })
    }

    /// Norm weights and biases: excluded from weight decay where decay groups are asked for.
    #[must_use]
    pub fn is_norm_or_bias(self) -> bool {
        !matches!(
            self,
            Self::Embedding
                | Self::Projection
                | Self::Value
                | Self::Router
                | Self::SharedGate
                | Self::Convolution
        ) && !self.is_linear()
            && !self.is_expert()
            && !self.is_adapter()
    }

    /// The matrices of all experts of a layer.
    #[must_use]
    pub fn is_expert(self) -> bool {
        matches!(
            self,
            Self::ExpertGate | Self::ExpertUp | Self::ExpertGateUp | Self::ExpertDown
        )
    }

    /// The weight matrices of a layer that every token goes through: those of its mixer and of a dense MLP.
    #[must_use]
    pub fn is_linear(self) -> bool {
        TargetModule::of(self).is_some()
    }

    /// The low-rank matrices of an adapter.
    #[must_use]
    pub fn is_adapter(self) -> bool {
        matches!(self, Self::LoraA(_) | Self::LoraB(_))
    }

    /// Norm weights: initialised to one (to zero where the family stores w − 1).
    #[must_use]
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::InputNorm | Self::QNorm | Self::KNorm | Self::PostNorm | Self::DeltaNorm
        )
    }
}

/// A matrix that can have an adapter (PEFT's `target_modules`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(
    missing_docs,
    reason = "the variants are the field's own names for these matrices"
)]
pub enum TargetModule {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    DeltaQkv,
    DeltaZ,
    DeltaA,
    DeltaB,
    DeltaOut,
}

/// Target modules in the order of the enum, their names, and the slots of their matrices.
const TARGET_MODULES: [(TargetModule, &str, Slot); 12] = [
    (TargetModule::Q, "q_proj", Slot::Q),
    (TargetModule::K, "k_proj", Slot::K),
    (TargetModule::V, "v_proj", Slot::V),
    (TargetModule::O, "o_proj", Slot::O),
    (TargetModule::Gate, "gate_proj", Slot::Gate),
    (TargetModule::Up, "up_proj", Slot::Up),
    (TargetModule::Down, "down_proj", Slot::Down),
    (TargetModule::DeltaQkv, "in_proj_qkv", Slot::DeltaQkv),
    (TargetModule::DeltaZ, "in_proj_z", Slot::DeltaZ),
    (TargetModule::DeltaA, "in_proj_a", Slot::DeltaA),
    (TargetModule::DeltaB, "in_proj_b", Slot::DeltaB),
    (TargetModule::DeltaOut, "out_proj", Slot::DeltaOut),
];

/// What a parameter is in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One tensor of its name and shape.
    Whole,
    /// A tensor for each of so many experts, in whose name the index stands in place of the `*`; in memory one lies below the other.
    ByExpert(usize),
}

/// A parameter's role, and its name and shape in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Role in its unit.
    pub slot: Slot,
    /// Hugging Face tensor name; PEFT's for an adapter; with a `*` for the index of an expert.
    pub name: String,
    /// Shape: `[n]`, `[out, in]`, `[channels, 1, taps]` of a convolution, or `[experts, out, in]` of experts in one tensor; of all experts
    /// together, `[experts · out, in]`.
    pub shape: Vec<usize>,
    /// Whether it is trained: in a model with adapters only they are (and a value head).
    pub trainable: bool,
    /// What it is in a checkpoint.
    pub stored: Stored,
}

impl ParamSpec {
    /// A trainable parameter.
    #[must_use]
    pub fn new(slot: Slot, name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            slot,
            name: name.into(),
            shape: shape.to_vec(),
            trainable: true,
            stored: Stored::Whole,
        }
    }

    /// The matrices `[out, in]` of all experts.
    fn of_experts(slot: Slot, name: String, experts: usize, [out, input]: [usize; 2]) -> Self {
        Self {
            stored: Stored::ByExpert(experts),
            ..Self::new(slot, name, &[experts * out, input])
        }
    }

    /// The tensors of a checkpoint that it is made of, from its first row to its last, each with its own name and shape.
    #[must_use]
    pub fn tensors(&self) -> Vec<Self> {
        let Stored::ByExpert(experts) = self.stored else {
            return vec![self.clone()];
        };
        let [rows, cols] = self.rows_cols();
        let one = |index: usize| Self {
            name: self.name.replacen('*', &index.to_string(), 1),
            shape: vec![rows / experts, cols],
            stored: Stored::Whole,
            ..self.clone()
        };
        (0..experts).map(one).collect()
    }

    /// Shape of the tensor in memory, `[rows, columns]`: a vector is one row.
    #[must_use]
    pub fn rows_cols(&self) -> [usize; 2] {
        match self.shape[..] {
            [n] => [1, n],
            [rows, cols] => [rows, cols],
            [all, rows, cols] => [all * rows, cols],
            _ => unreachable!("every parameter of a decoder is a vector or a matrix"),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The parameters of a unit without adapters. A tied head has no projection of its own: it uses the embedding's.
#[must_use]
pub fn unit_specs(arch: &Arch, kind: UnitKind) -> Vec<ParamSpec> {
    match kind {
        UnitKind::Embedding => {
            vec![ParamSpec::new(
                Slot::Embedding,
                "model.embed_tokens.weight",
                &[arch.vocab_size, arch.hidden_size],
            )]
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
    let p = format!("model.layers.{layer}");
    let (d, hd) = (arch.hidden_size, arch.head_dim);
    let (q, kv) = (arch.num_heads * hd, arch.num_kv_heads * hd);
    // a gate lies beside each query head
    let wide = if arch.attention_gate { 2 * q } else { q };
    let mut specs = Vec::new();
    if arch.pre_norms {
        let name = format!("{p}.input_layernorm.weight");
        specs.push(ParamSpec::new(Slot::InputNorm, name, &[d]));
    }
    specs.extend([
        ParamSpec::new(Slot::Q, format!("{p}.self_attn.q_proj.weight"), &[wide, d]),
        ParamSpec::new(Slot::K, format!("{p}.self_attn.k_proj.weight"), &[kv, d]),
        ParamSpec::new(Slot::V, format!("{p}.self_attn.v_proj.weight"), &[kv, d]),
        ParamSpec::new(Slot::O, format!("{p}.self_attn.o_proj.weight"), &[d, q]),
    ]);
    if arch.qkv_bias {
        specs.extend([
            ParamSpec::new(Slot::QBias, format!("{p}.self_attn.q_proj.bias"), &[wide]),
            ParamSpec::new(Slot::KBias, format!("{p}.self_attn.k_proj.bias"), &[kv]),
            ParamSpec::new(Slot::VBias, format!("{p}.self_attn.v_proj.bias"), &[kv]),
        ]);
    }
    if arch.o_bias {
        specs.push(ParamSpec::new(
            Slot::OBias,
            format!("{p}.self_attn.o_proj.bias"),
            &[d],
        ));
    }
    if let Some(over) = arch.qk_norm {
        let [q, k] = match over {
            QkNorm::Heads => [hd, hd],
            QkNorm::Projection => [q, kv],
        };
        specs.extend([
            ParamSpec::new(Slot::QNorm, format!("{p}.self_attn.q_norm.weight"), &[q]),
            ParamSpec::new(Slot::KNorm, format!("{p}.self_attn.k_norm.weight"), &[k]),
        ]);
    }
    if arch.post_norms {
        specs.push(ParamSpec::new(
            Slot::PostNorm,
            format!("{p}.post_attention_layernorm.weight"),
            &[d],
        ));
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

fn mlp_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let p = format!("model.layers.{layer}");
    let d = arch.hidden_size;
    // where there are norms after the halves, one of them has the name that the norm before the MLP has elsewhere
    let norm = if arch.post_norms {
        "pre_feedforward_layernorm"
    } else {
        "post_attention_layernorm"
    };
    let mut specs = Vec::new();
    if arch.pre_norms {
        let name = format!("{p}.{norm}.weight");
        specs.push(ParamSpec::new(Slot::InputNorm, name, &[d]));
    }
    specs.extend(match arch.experts(layer) {
        None => dense_specs(arch, arch.intermediate_size, &format!("{p}.mlp")),
        Some(experts) => expert_specs(arch, experts, &format!("{p}.mlp")),
    });
    if arch.post_norms {
        specs.push(ParamSpec::new(
            Slot::PostNorm,
            format!("{p}.post_feedforward_layernorm.weight"),
            &[d],
        ));
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
    let all = |slot, module: &str, [out, input]: [usize; 2]| {
        ParamSpec::new(slot, format!("{p}.experts.{module}"), &[count, out, input])
    };
    let router = ParamSpec::new(Slot::Router, format!("{p}.gate.weight"), &[count, d]);
    let mut specs = vec![router];
    if experts.stacked {
        specs.extend([
            all(Slot::ExpertGateUp, "gate_up_proj", [2 * ff, d]),
            all(Slot::ExpertDown, "down_proj", [d, ff]),
        ]);
    } else {
        specs.extend([
            each(Slot::ExpertGate, "gate_proj", [ff, d]),
            each(Slot::ExpertUp, "up_proj", [ff, d]),
            each(Slot::ExpertDown, "down_proj", [d, ff]),
        ]);
    }
    if let Some(width) = experts.shared {
        specs.extend(dense_specs(arch, width, &format!("{p}.shared_expert")));
        let name = format!("{p}.shared_expert_gate.weight");
        specs.push(ParamSpec::new(Slot::SharedGate, name, &[1, d]));
    }
    specs
}

fn head_specs(arch: &Arch) -> Vec<ParamSpec> {
    let d = arch.hidden_size;
    let mut specs = vec![ParamSpec::new(Slot::InputNorm, "model.norm.weight", &[d])];
    match arch.head {
        HeadKind::LanguageModel if arch.tied => {}
        HeadKind::LanguageModel => {
            specs.push(ParamSpec::new(
                Slot::Projection,
                "lm_head.weight",
                &[arch.vocab_size, d],
            ));
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
