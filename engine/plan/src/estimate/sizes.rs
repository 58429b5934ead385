//! Numbers of parameters, by what holds them.

use super::experts::ExpertSizes;
use firebrick_spec::Arch;
use firebrick_spec::arch::HeadKind;
use firebrick_spec::lora::LoraConfig;
use firebrick_spec::parameters::{ParamSpec, Slot, UnitKind, unit_specs};
use firebrick_spec::{Backend, DeviceProfile};

/// Bytes of a number that is f32 in every precision.
pub(super) const F32: u64 = 4;

/// Outputs that kernels lay side by side; the last ones are filled up.
const PANEL: usize = 32;

/// Codes of inputs that a GPU has in a word.
const WORD: usize = 4;

/// A layer's matrices in 8 bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantizedWeights {
    /// Bytes of all of them: a byte a number, and an f32 scale an output.
    pub bytes: u64,
    /// Numbers of them, and of the largest.
    pub numbers: u64,
    pub largest: u64,
    /// Rows up to which a product widens numbers as it reads them. With more the matrix is widened first.
    pub max_fused_rows: u64,
    /// Whether such a product is in the precision that is sampled in, on tensor cores; it is in f32 elsewhere.
    pub tensor_cores: bool,
}

impl QuantizedWeights {
    /// Of an architecture's layers, sampled in weights of so many bytes.
    pub fn of(arch: &Arch, profile: &DeviceProfile, width: u64) -> Self {
        let halves = [UnitKind::Attention(0), UnitKind::Mlp(0)];
        let specs = halves.into_iter().flat_map(|half| unit_specs(arch, half));
        let shapes: Vec<[usize; 2]> = specs
            .filter(|spec| spec.slot.is_linear())
            .map(|spec| spec.rows_cols())
            .collect();
        let word = if profile.backend == Backend::Cpu {
            1
        } else {
            WORD
        };
        let bytes = |&[outputs, inputs]: &[usize; 2]| {
            outputs.next_multiple_of(PANEL) as u64 * (inputs.next_multiple_of(word) as u64 + F32)
        };
        let numbers = |[outputs, inputs]: &[usize; 2]| (outputs * inputs) as u64;
        let product = profile.kernels.quantized(width < F32);
        Self {
            bytes: shapes.iter().map(bytes).sum(),
            numbers: shapes.iter().map(numbers).sum(),
            largest: shapes.iter().map(numbers).max().unwrap_or(0),
            max_fused_rows: product.max_fused_rows as u64,
            tensor_cores: product.tensor_cores,
        }
    }
}

/// Parameters of an architecture's parts, adapters included. Layers are alike but for their feed-forwards, dense or of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// The embedding.
    pub embedding: u64,
    /// One attention half.
    pub attention: u64,
    /// One dense feed-forward half.
    pub mlp: u64,
    experts: ExpertSizes,
    /// Final norm and, where it is not the embedding, the projection.
    pub head: u64,
    /// Layers.
    pub layers: u64,
    /// The largest matrix.
    pub largest: u64,
    /// The projection that the head uses, whoever owns it.
    pub projection: u64,
    /// Adapters of an attention and of an MLP half, where they alone are trained.
    adapters: Option<[u64; 2]>,
    /// The value head beside the projection, which trains beside adapters too.
    value: u64,
    /// The largest matrix that is trained.
    pub largest_trained: u64,
    /// Bytes of a weight.
    pub width: u64,
}

impl Sizes {
    /// Counts an architecture's parameters. With adapters they alone are trained.
    #[must_use]
    pub fn of(arch: &Arch, lora: Option<&LoraConfig>) -> Self {
        let specs = |kind| {
            let mut specs = unit_specs(arch, kind);
            let own = lora.map_or_else(Vec::new, |l| l.specs(&specs));
            specs.extend(own);
            specs
        };
        let trained = |spec: &&ParamSpec| {
            lora.is_none() || spec.slot.is_adapter() || spec.slot == Slot::Value
        };
        let count = |specs: &[ParamSpec]| specs.iter().map(|s| s.numel() as u64).sum::<u64>();
        let adapters = |specs: &[ParamSpec]| {
            let own = specs.iter().filter(|s| s.slot.is_adapter());
            own.map(|s| s.numel() as u64).sum::<u64>()
        };
        // where no layer is dense this counts nothing
        let dense = (0..arch.num_layers).find(|&layer| arch.experts(layer).is_none());
        let dense = dense.unwrap_or(0);
        let units = [
            UnitKind::Embedding,
            UnitKind::Attention(0),
            UnitKind::Mlp(dense),
            UnitKind::Head,
        ]
        .map(specs);
        let mixture = arch.expert_layers().next();
        let mixture = mixture.map(|(layer, _)| specs(UnitKind::Mlp(layer)));
        let all = || units.iter().chain(&mixture).flatten();
        let largest = |specs: &mut dyn Iterator<Item = &ParamSpec>| {
            specs.map(ParamSpec::numel).max().unwrap_or(0) as u64
        };
        let projection = match arch.head {
            HeadKind::LanguageModel => arch.vocab_size * arch.hidden_size,
            HeadKind::Scalar { .. } => arch.hidden_size,
        };
        let [embedding, attention, mlp, head] = &units;
        Self {
            embedding: count(embedding),
            attention: count(attention),
            mlp: count(mlp),
            experts: ExpertSizes::of(arch),
            head: count(head),
            layers: arch.num_layers as u64,
            largest: largest(&mut all()),
            projection: projection as u64,
            adapters: lora.map(|_| [adapters(attention), adapters(mlp)]),
            value: if arch.joint_value_head {
                arch.hidden_size as u64
            } else {
                0
            },
            largest_trained: largest(&mut all().filter(trained)),
            width: arch.precision.width(),
        }
    }

    /// Whether weights are rounded copies of f32 masters.
    #[must_use]
    pub fn is_half(&self) -> bool {
        self.width < F32
    }

    /// Parameters of a unit of the body that are trained.
    #[must_use]
    pub fn trained_unit(&self, index: usize) -> u64 {
        match self.adapters {
            None => self.unit(index),
            Some([attention, _]) if is_attention(index) => attention,
            Some(_) if self.has_experts(index) => 0,
            Some([_, mlp]) => mlp,
        }
    }

    /// Parameters that are trained.
    #[must_use]
    pub fn trained(&self) -> u64 {
        match self.adapters {
            None => self.total(),
            Some([attention, mlp]) => {
                self.layers * attention + self.dense_layers() * mlp + self.value
            }
        }
    }

    /// Whether embedding and head are trained: `numbers` of theirs, or none.
    #[must_use]
    pub fn trained_ends(&self, numbers: u64) -> u64 {
        if self.adapters.is_some() { 0 } else { numbers }
    }

    /// The largest layer.
    #[must_use]
    pub fn layer(&self) -> u64 {
        let dense = if self.dense_layers() > 0 { self.mlp } else { 0 };
        self.attention + dense.max(self.experts.all)
    }

    /// Layers whose feed-forward is dense.
    #[must_use]
    pub fn dense_layers(&self) -> u64 {
        self.layers - self.experts.layers.count()
    }

    /// Layers with experts.
    #[must_use]
    pub fn expert_layers(&self) -> u64 {
        self.experts.layers.count()
    }

    /// Everything between embedding and head that one token goes through.
    #[must_use]
    pub fn active_body(&self) -> u64 {
        self.body() - self.experts.unused(1.0)
    }

    /// All parameters that any of so many tokens goes through.
    #[must_use]
    pub fn used(&self, tokens: u64) -> u64 {
        self.total() - self.experts.unused(tokens as f64)
    }

    /// The matrices of all experts.
    #[must_use]
    pub fn expert_matrices(&self) -> u64 {
        self.experts.layers.count() * self.experts.matrices
    }

    /// Everything between embedding and head.
    #[must_use]
    pub fn body(&self) -> u64 {
        self.layers * self.attention
            + self.dense_layers() * self.mlp
            + self.expert_layers() * self.experts.all
    }

    /// Embedding and head.
    #[must_use]
    pub fn ends(&self) -> u64 {
        self.embedding + self.head
    }

    /// All parameters, tied ones once.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.body() + self.ends()
    }

    fn has_experts(&self, index: usize) -> bool {
        !is_attention(index) && self.experts.layers.has(layer_of(index))
    }

    /// A unit of the body by its index in the chain: attention halves are odd, feed-forward halves even.
    #[must_use]
    pub fn unit(&self, index: usize) -> u64 {
        if is_attention(index) {
            self.attention
        } else if self.has_experts(index) {
            self.experts.all
        } else {
            self.mlp
        }
    }
}

/// Whether a unit of the body is an attention half: the chain is embedding, (attention, MLP) × layers, head.
pub(super) fn is_attention(unit: usize) -> bool {
    unit % 2 == 1
}

/// The layer that a unit of the body is in.
pub(super) fn layer_of(unit: usize) -> usize {
    (unit - 1) / 2
}
