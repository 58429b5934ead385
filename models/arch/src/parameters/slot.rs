//! The roles of parameters, and the matrices that may have adapters.

/// The role of a parameter in its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the variants are the field's own names for these matrices")]
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
    /// The numbers that join each query head's softmax, `[heads]`.
    Sinks,
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
    RouterBias,
    /// One expert below the other: `[experts · width, hidden]`.
    ExpertGate,
    /// As [`Self::ExpertGate`].
    ExpertUp,
    /// One expert below the other, of each the gate's rows and then those of up: `[experts · 2 width, hidden]`, in
    /// place of [`Self::ExpertGate`] and [`Self::ExpertUp`] where a checkpoint has them so.
    ExpertGateUp,
    /// One expert below the other: `[experts · hidden, width]`.
    ExpertDown,
    /// A row for each expert: `[experts, 2 width]`, the gate's before those of up.
    ExpertGateUpBias,
    /// A row for each expert: `[experts, hidden]`.
    ExpertDownBias,
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
    pub fn bias(self) -> Option<Self> {
        Some(match self {
            Self::Q => Self::QBias,
            Self::K => Self::KBias,
            Self::V => Self::VBias,
            Self::O => Self::OBias,
            Self::Gate => Self::GateBias,
            Self::Up => Self::UpBias,
            Self::Down => Self::DownBias,
            Self::Router => Self::RouterBias,
            Self::ExpertGateUp => Self::ExpertGateUpBias,
            Self::ExpertDown => Self::ExpertDownBias,
            Self::Projection => Self::ProjectionBias,
            _ => return None,
        })
    }

    /// Norm weights, biases and attention's sinks: excluded from weight decay where decay groups are asked for.
    pub fn is_norm_or_bias(self) -> bool {
        !matches!(
            self,
            Self::Embedding | Self::Projection | Self::Value | Self::Router | Self::SharedGate | Self::Convolution
        ) && !self.is_linear()
            && !self.is_expert()
            && !self.is_adapter()
    }

    /// The matrices of all experts of a layer.
    pub fn is_expert(self) -> bool {
        matches!(self, Self::ExpertGate | Self::ExpertUp | Self::ExpertGateUp | Self::ExpertDown)
    }

    /// The weight matrices of a layer that every token goes through: those of its mixer and of a dense MLP.
    pub fn is_linear(self) -> bool {
        TargetModule::from_slot(self).is_some_and(|target| !target.is_expert())
    }

    /// The low-rank matrices of an adapter.
    pub fn is_adapter(self) -> bool {
        matches!(self, Self::LoraA(_) | Self::LoraB(_))
    }

    /// Norm weights: initialised to one (to zero where the family stores w − 1).
    pub fn is_norm(self) -> bool {
        matches!(self, Self::InputNorm | Self::QNorm | Self::KNorm | Self::PostNorm | Self::DeltaNorm)
    }
}

/// A matrix that can have an adapter (PEFT's `target_modules`), or the matrices of all experts of a layer, which have
/// one each (modules of their own, or PEFT's `target_parameters`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the variants are the field's own names for these matrices")]
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
    ExpertGate,
    ExpertUp,
    ExpertGateUp,
    ExpertDown,
}

/// Target modules in the order of the enum, their names, and the slots of their matrices.
pub(super) const TARGET_MODULES: [(TargetModule, &str, Slot); 16] = [
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
    (TargetModule::ExpertGate, "gate_proj", Slot::ExpertGate),
    (TargetModule::ExpertUp, "up_proj", Slot::ExpertUp),
    (TargetModule::ExpertGateUp, "gate_up_proj", Slot::ExpertGateUp),
    (TargetModule::ExpertDown, "down_proj", Slot::ExpertDown),
];
