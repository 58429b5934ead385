//! Units: the links of the chain that a decoder is, and the parameters each one owns.
//!
//! One table, [`unit_specs`], names every parameter once, and bypasses add theirs to the units they belong to; loading, export,
//! random start, gradients and optimizer state all follow its order.

use crate::adapter::{Bypass, Target};
use crate::arch::{Arch, Family, HeadKind};
use burn::tensor::Tensor;
use firebrick_backends::kernels::{self, Panels};

/// A link of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnitKind {
    /// Token ids to hidden rows.
    Embedding,
    /// The attention half of a layer, residual included.
    Attention(usize),
    /// The MLP half of a layer, residual included.
    Mlp(usize),
    /// Final norm and projection.
    Head,
}

/// What a parameter is used for in its unit.
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
    PostNorm,
    Gate,
    Up,
    Down,
    GateBias,
    UpBias,
    DownBias,
    Projection,
    ProjectionBias,
    Value,
    LoraA(Target),
    LoraB(Target),
}

impl Slot {
    /// Norm weights and biases: excluded from weight decay where decay groups are asked for.
    #[must_use]
    pub fn is_norm_or_bias(self) -> bool {
        !matches!(self, Self::Embedding | Self::Projection | Self::Value)
            && !self.is_linear()
            && !self.is_adapter()
    }

    /// The matrices of a layer: projections and MLP.
    #[must_use]
    pub fn is_linear(self) -> bool {
        matches!(
            self,
            Self::Q | Self::K | Self::V | Self::O | Self::Gate | Self::Up | Self::Down
        )
    }

    /// Matrices of a bypass.
    #[must_use]
    pub fn is_adapter(self) -> bool {
        matches!(self, Self::LoraA(_) | Self::LoraB(_))
    }

    /// Norm weights: start at one (or at zero where the family stores w − 1).
    #[must_use]
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::InputNorm | Self::QNorm | Self::KNorm | Self::PostNorm
        )
    }
}

/// A parameter's use, checkpoint name and checkpoint shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamSpec {
    /// Use in its unit.
    pub slot: Slot,
    /// Hugging Face tensor name; PEFT's where it belongs to a bypass.
    pub name: String,
    /// Shape in the checkpoint: `[n]` or `[out, in]`.
    pub shape: Vec<usize>,
    /// Whether training changes it: beside bypasses, nothing else does.
    pub trainable: bool,
}

impl ParamSpec {
    pub(crate) fn new(slot: Slot, name: impl Into<String>, shape: &[usize]) -> Self {
        Self {
            slot,
            name: name.into(),
            shape: shape.to_vec(),
            trainable: true,
        }
    }

    /// Shape of the tensor in memory: vectors are single rows.
    #[must_use]
    pub fn rows_cols(&self) -> [usize; 2] {
        match self.shape[..] {
            [n] => [1, n],
            [rows, cols] => [rows, cols],
            _ => unreachable!("every parameter of a decoder is a vector or a matrix"),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The chain of an architecture, in order.
#[must_use]
pub fn chain(arch: &Arch) -> Vec<UnitKind> {
    let layers = (0..arch.num_layers).flat_map(|i| [UnitKind::Attention(i), UnitKind::Mlp(i)]);
    std::iter::once(UnitKind::Embedding)
        .chain(layers)
        .chain(std::iter::once(UnitKind::Head))
        .collect()
}

/// The parameters that a unit owns, bypasses apart. A tied head owns no projection: it borrows the embedding's.
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
        UnitKind::Attention(layer) => attention_specs(arch, layer),
        UnitKind::Mlp(layer) => mlp_specs(arch, layer),
        UnitKind::Head => head_specs(arch),
    }
}

fn attention_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let p = format!("model.layers.{layer}");
    let (d, hd) = (arch.hidden_size, arch.head_dim);
    let (q, kv) = (arch.num_heads * hd, arch.num_kv_heads * hd);
    let mut specs = vec![
        ParamSpec::new(Slot::InputNorm, format!("{p}.input_layernorm.weight"), &[d]),
        ParamSpec::new(Slot::Q, format!("{p}.self_attn.q_proj.weight"), &[q, d]),
        ParamSpec::new(Slot::K, format!("{p}.self_attn.k_proj.weight"), &[kv, d]),
        ParamSpec::new(Slot::V, format!("{p}.self_attn.v_proj.weight"), &[kv, d]),
        ParamSpec::new(Slot::O, format!("{p}.self_attn.o_proj.weight"), &[d, q]),
    ];
    if arch.qkv_bias {
        specs.extend([
            ParamSpec::new(Slot::QBias, format!("{p}.self_attn.q_proj.bias"), &[q]),
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
    if arch.qk_norm {
        specs.extend([
            ParamSpec::new(Slot::QNorm, format!("{p}.self_attn.q_norm.weight"), &[hd]),
            ParamSpec::new(Slot::KNorm, format!("{p}.self_attn.k_norm.weight"), &[hd]),
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

fn mlp_specs(arch: &Arch, layer: usize) -> Vec<ParamSpec> {
    let p = format!("model.layers.{layer}");
    let (d, ff) = (arch.hidden_size, arch.intermediate_size);
    let norm = match arch.family {
        Family::Gemma2 => "pre_feedforward_layernorm",
        _ => "post_attention_layernorm",
    };
    let mut specs = vec![
        ParamSpec::new(Slot::InputNorm, format!("{p}.{norm}.weight"), &[d]),
        ParamSpec::new(Slot::Gate, format!("{p}.mlp.gate_proj.weight"), &[ff, d]),
        ParamSpec::new(Slot::Up, format!("{p}.mlp.up_proj.weight"), &[ff, d]),
        ParamSpec::new(Slot::Down, format!("{p}.mlp.down_proj.weight"), &[d, ff]),
    ];
    if arch.mlp_bias {
        specs.extend([
            ParamSpec::new(Slot::GateBias, format!("{p}.mlp.gate_proj.bias"), &[ff]),
            ParamSpec::new(Slot::UpBias, format!("{p}.mlp.up_proj.bias"), &[ff]),
            ParamSpec::new(Slot::DownBias, format!("{p}.mlp.down_proj.bias"), &[d]),
        ]);
    }
    if arch.post_norms {
        specs.push(ParamSpec::new(
            Slot::PostNorm,
            format!("{p}.post_feedforward_layernorm.weight"),
            &[d],
        ));
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

/// A unit's weights as tensors: `[out, in]` matrices and `[1, n]` vectors, in the order of its specs.
#[derive(Clone, Debug)]
pub struct Weights {
    entries: Vec<(Slot, Tensor<2>)>,
    /// Copies of matrices that are laid out for products with few rows.
    panels: Vec<(Slot, Panels)>,
}

impl Weights {
    /// Pairs tensors with their slots.
    #[must_use]
    pub fn new(entries: Vec<(Slot, Tensor<2>)>) -> Self {
        Self {
            entries,
            panels: Vec::new(),
        }
    }

    /// The same with copies of some matrices that products with few rows read instead; `copy` says of which.
    pub(crate) fn packed<E>(
        &self,
        copy: impl Fn(Slot, &Tensor<2>) -> Result<Option<Panels>, E>,
    ) -> Result<Self, E> {
        let mut panels = Vec::new();
        for (slot, matrix) in &self.entries {
            panels.extend(copy(*slot, matrix)?.map(|own| (*slot, own)));
        }
        Ok(Self {
            entries: self.entries.clone(),
            panels,
        })
    }

    /// The copy of a slot's matrix, if there is one.
    pub(crate) fn panels(&self, slot: Slot) -> Option<&Panels> {
        let own = self.panels.iter().find(|(s, _)| *s == slot);
        own.map(|(_, panels)| panels)
    }

    /// Bytes of the copies.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.panels.iter().map(|(_, panels)| panels.bytes()).sum()
    }

    /// The tensor in `slot`, if the unit has one.
    #[must_use]
    pub fn get(&self, slot: Slot) -> Option<Tensor<2>> {
        self.entries
            .iter()
            .find(|(s, _)| *s == slot)
            .map(|(_, t)| t.clone())
    }

    /// The tensor in a slot that every unit of this kind has.
    pub(crate) fn need(&self, slot: Slot) -> Tensor<2> {
        self.get(slot)
            .unwrap_or_else(|| unreachable!("a unit without its {slot:?}"))
    }

    /// The tensor at a place in the order.
    pub(crate) fn at(&self, index: usize) -> Tensor<2> {
        self.entries[index].1.clone()
    }

    /// Takes a tensor out, to be put back: until then an empty one stands in its place.
    pub(crate) fn take(&mut self, index: usize) -> Tensor<2> {
        let device = self.entries[index].1.device();
        std::mem::replace(&mut self.entries[index].1, Tensor::empty([0, 0], &device))
    }

    /// Puts a tensor back.
    pub(crate) fn put(&mut self, index: usize, value: Tensor<2>) {
        self.entries[index].1 = value;
    }

    /// Tensors in order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor<2>> {
        self.entries.iter().map(|(_, t)| t)
    }

    /// Slots and tensors in order.
    pub fn into_entries(self) -> impl Iterator<Item = (Slot, Tensor<2>)> {
        self.entries.into_iter()
    }

    /// The same slots with other tensors.
    #[must_use]
    pub fn map(&self, f: impl Fn(&Tensor<2>) -> Tensor<2>) -> Self {
        Self::new(self.entries.iter().map(|(s, t)| (*s, f(t))).collect())
    }

    /// A and B of a bypass, if there is one.
    pub(crate) fn bypass(&self, target: Target) -> Option<(Tensor<2>, Tensor<2>)> {
        Some((
            self.get(Slot::LoraA(target))?,
            self.get(Slot::LoraB(target))?,
        ))
    }

    /// `x · Wᵀ (+ b) (+ bypass)` for `x` of shape `[rows, in]`.
    pub(crate) fn linear(
        &self,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let [y] = self.products(x, [weight]);
        self.beside(y, x, weight, bias, bypass)
    }

    /// The same with several matrices and their biases, of the same rows.
    pub(crate) fn linear_each<const N: usize>(
        &self,
        x: &Tensor<2>,
        maps: [(Slot, Slot); N],
        bypass: Option<Bypass<'_>>,
    ) -> [Tensor<2>; N] {
        let products = self.products(x, maps.map(|(weight, _)| weight));
        let mut products = products.into_iter();
        maps.map(|(weight, bias)| {
            let y = products.next().unwrap_or_else(|| unreachable!("one each"));
            self.beside(y, x, weight, bias, bypass)
        })
    }

    /// The same, added to `base`.
    pub(crate) fn linear_onto(
        &self,
        base: Tensor<2>,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let apart = |base| base + self.linear(x, weight, bias, bypass);
        if !self.is_alone(weight, bias, bypass) {
            return apart(base);
        }
        match self.panels(weight) {
            Some(packed) => packed.linear_onto(base, x).unwrap_or_else(apart),
            None => {
                let fused = kernels::linear_onto(&base, x, &self.need(weight));
                fused.unwrap_or_else(|| apart(base))
            }
        }
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` where a kernel makes it of one piece.
    pub(crate) fn linear_gated(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        match self.panels(Slot::Gate).zip(self.panels(Slot::Up)) {
            Some((gate, up)) => Panels::linear_gated(gate, up, x),
            None => kernels::linear_gated(x, &self.need(Slot::Gate), &self.need(Slot::Up)),
        }
    }

    /// `x · Wᵀ` with the matrices of several slots.
    fn products<const N: usize>(&self, x: &Tensor<2>, slots: [Slot; N]) -> [Tensor<2>; N] {
        let packed: Vec<&Panels> = slots.iter().filter_map(|&s| self.panels(s)).collect();
        let packed: Option<[&Panels; N]> = packed.try_into().ok();
        if let Some(packed) = packed {
            if let Some(products) = Panels::linear_each(x, packed) {
                return products;
            }
            // other numbers would be another policy, without a word
            assert!(
                packed.iter().all(|w| w.is_exact()),
                "8-bit weights are made where kernels read them"
            );
        }
        let weights = slots.map(|slot| self.need(slot));
        let weights = weights.each_ref();
        kernels::linear_each(x, weights).unwrap_or_else(|| weights.map(|w| product(x, w)))
    }

    /// Whether a matrix has neither bias nor bypass beside it.
    pub(crate) fn is_alone(&self, weight: Slot, bias: Slot, bypass: Option<Bypass<'_>>) -> bool {
        let target = bypass.and_then(|_| Target::of(weight));
        self.get(bias).is_none() && target.and_then(|t| self.bypass(t)).is_none()
    }

    /// A product with the bias and the bypass that stand beside its matrix.
    fn beside(
        &self,
        y: Tensor<2>,
        x: &Tensor<2>,
        weight: Slot,
        bias: Slot,
        bypass: Option<Bypass<'_>>,
    ) -> Tensor<2> {
        let y = match self.get(bias) {
            Some(b) => y + b,
            None => y,
        };
        let Some((bypass, target)) = bypass.zip(Target::of(weight)) else {
            return y;
        };
        match self.bypass(target) {
            Some((a, b)) => y + bypass.run(x.clone(), target, &a, &b),
            None => y,
        }
    }
}

/// `x · Wᵀ` for `x` of shape `[rows, in]` and `w` of shape `[out, in]`.
pub(crate) fn product(x: &Tensor<2>, w: &Tensor<2>) -> Tensor<2> {
    kernels::linear(x, w).unwrap_or_else(|| x.clone().matmul(w.clone().transpose()))
}
