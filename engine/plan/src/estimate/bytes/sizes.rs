//! Numbers of parameters, by what holds them.

use crate::estimate::{BaseSizes, ExpertSizes, LayerSet, SUBLAYERS};
use firebrick_arch::Arch;
use firebrick_arch::PipelineStage;
use firebrick_arch::arch::{HeadKind, Mixer};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::parameters::{ParamSpec, Slot, UnitKind, unit_specs};
use firebrick_spec::{Backend, DeviceProfile};
use std::ops::Range;

/// Bytes of a number that is f32 in every precision.
pub(crate) const F32: u64 = 4;

/// Outputs that kernels lay side by side; the last ones are filled up.
const PANEL: usize = 32;

/// Codes of inputs that a GPU has in a word.
const WORD: usize = 4;

/// The kinds of sublayers that an architecture has, a unit of each, and how many there are.
pub(crate) fn sublayers(arch: &Arch) -> impl Iterator<Item = (UnitKind, u64)> {
    let layers = 0..arch.num_layers;
    Sublayer::ALL.into_iter().filter_map(move |sublayer| {
        let count = sublayer.layers(arch, layers.clone()).count();
        Some((sublayer.unit(arch, layers.clone())?, count as u64))
    })
}

/// All layers' matrices in 8 bits.
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
        let shapes: Vec<([usize; 2], u64)> = sublayers(arch)
            .flat_map(|(sublayer, count)| {
                let specs = unit_specs(arch, sublayer).into_iter();
                specs.map(move |spec| (spec, count))
            })
            .filter(|(spec, _)| spec.slot.is_linear())
            .map(|(spec, count)| (spec.rows_cols(), count))
            .collect();
        let word = if profile.backend == Backend::Cpu { 1 } else { WORD };
        let bytes = |&[outputs, inputs]: &[usize; 2]| {
            outputs.next_multiple_of(PANEL) as u64 * (inputs.next_multiple_of(word) as u64 + F32)
        };
        let numbers = |[outputs, inputs]: &[usize; 2]| (outputs * inputs) as u64;
        let product = profile.kernels.quantized(width < F32);
        Self {
            bytes: shapes.iter().map(|(shape, n)| n * bytes(shape)).sum(),
            numbers: shapes.iter().map(|(shape, n)| n * numbers(shape)).sum(),
            largest: shapes.iter().map(|(shape, _)| numbers(shape)).max().unwrap_or(0),
            max_fused_rows: product.max_fused_rows as u64,
            tensor_cores: product.tensor_cores,
        }
    }
}

/// Parameters of an architecture's parts, adapters included: all of them, or those of a stage. Layers differ in their
/// mixers and in their feed-forwards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    /// The embedding.
    pub embedding: u64,
    /// One sublayer of each kind; none where there are no such layers.
    sublayers: [u64; SUBLAYERS],
    experts: ExpertSizes,
    /// Final norm and, where it is not the embedding, the projection.
    pub head: u64,
    /// Layers.
    pub layers: u64,
    /// The largest matrix.
    pub largest: u64,
    /// The projection that the head uses, whoever owns it; 0 on a stage without the head.
    pub projection: u64,
    /// Which layers have linear attention.
    linear_layers: LayerSet,
    /// Adapters of each kind of sublayer, where they alone are trained.
    adapters: Option<[u64; SUBLAYERS]>,
    /// The value head beside the projection, which trains beside adapters too.
    value: u64,
    /// The largest matrix that is trained.
    pub largest_trained: u64,
    /// Bytes of a weight that is not in few bits.
    pub width: u64,
    /// Matrices of layers in few bits.
    pub(crate) base: BaseSizes,
}

impl Sizes {
    /// Counts an architecture's parameters. With adapters they alone are trained.
    #[must_use]
    pub fn of(arch: &Arch, lora: Option<&LoraConfig>) -> Self {
        Self::of_stage(arch, lora, None)
    }

    /// Counts those of a stage, where layers are divided; a tied matrix is on the first and on the last.
    pub(crate) fn of_stage(arch: &Arch, lora: Option<&LoraConfig>, stage: Option<PipelineStage>) -> Self {
        let layers = stage.map_or(0..arch.num_layers, |own| own.layers(arch.num_layers));
        let has = |end: UnitKind| stage.is_none_or(|own| own.has(arch, end));
        let specs = |kind| {
            let mut specs = unit_specs(arch, kind);
            let own = lora.map_or_else(Vec::new, |l| l.specs(&specs));
            specs.extend(own);
            specs
        };
        let trained = |spec: &&ParamSpec| lora.is_none() || spec.slot.is_adapter() || spec.slot == Slot::Value;
        let count = |specs: &[ParamSpec]| specs.iter().map(|s| s.numel() as u64).sum::<u64>();
        let adapters = |specs: &[ParamSpec]| {
            let own = specs.iter().filter(|s| s.slot.is_adapter());
            own.map(|s| s.numel() as u64).sum::<u64>()
        };
        let ends = [UnitKind::Embedding, UnitKind::Head].map(|end| if has(end) { specs(end) } else { Vec::new() });
        let sublayers = Sublayer::ALL.map(|sublayer| sublayer.unit(arch, layers.clone()).map_or_else(Vec::new, specs));
        let all = || ends.iter().chain(&sublayers).flatten();
        let largest =
            |specs: &mut dyn Iterator<Item = &ParamSpec>| specs.map(ParamSpec::numel).max().unwrap_or(0) as u64;
        let projection = match arch.head {
            _ if !has(UnitKind::Head) => 0,
            HeadKind::LanguageModel => arch.vocab_size * arch.hidden_size,
            HeadKind::Scalar { .. } => arch.hidden_size,
        };
        let sublayers = sublayers.each_ref().map(Vec::as_slice);
        Self {
            embedding: count(&ends[0]),
            sublayers: sublayers.map(count),
            linear_layers: LayerSet::of(Sublayer::Linear.layers(arch, layers.clone())),
            experts: ExpertSizes::of(arch, &layers, sublayers[Sublayer::Experts as usize]),
            head: count(&ends[1]),
            layers: layers.len() as u64,
            largest: largest(&mut all()),
            projection: projection as u64,
            adapters: lora.map(|_| sublayers.map(adapters)),
            value: if arch.joint_value_head && has(UnitKind::Head) { arch.hidden_size as u64 } else { 0 },
            largest_trained: largest(&mut all().filter(trained)),
            width: arch.precision.width(),
            base: BaseSizes::of(arch, sublayers),
        }
    }

    /// Bytes of a sublayer.
    pub(crate) fn sublayer_bytes(&self, sublayer: Sublayer) -> u64 {
        let (few, bytes) = (self.base.numbers[sublayer as usize], self.base.bytes[sublayer as usize]);
        self.width * (self.sublayer_elements(sublayer) - few) + bytes
    }

    /// Bytes of a unit of the body by its index in the chain.
    pub(crate) fn unit_bytes(&self, index: usize) -> u64 {
        self.sublayer_bytes(self.sublayer(index))
    }

    /// Bytes of embedding and head.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.width * self.ends()
    }

    /// Bytes of all parameters, tied ones once.
    pub(crate) fn bytes(&self) -> u64 {
        self.over_sublayers(|sublayer| self.sublayer_bytes(sublayer)) + self.end_bytes()
    }

    /// Bytes of all parameters that any of so many tokens goes through.
    pub(crate) fn used_bytes(&self, tokens: u64) -> u64 {
        let sublayer = Sublayer::Experts as usize;
        // a shared expert's codes have as many bytes a number as those of the others
        let matrices = match self.base.numbers[sublayer] {
            0 => self.width * self.experts.matrices,
            numbers => {
                let share = self.experts.matrices as f64 / numbers as f64;
                (share * self.base.bytes[sublayer] as f64) as u64
            }
        };
        let each = matrices + self.width * self.experts.adapters;
        self.bytes() - self.experts.unused_of(each, tokens as f64)
    }

    /// Numbers of the body that are in few bits.
    pub(crate) fn in_few_bits(&self) -> u64 {
        self.over_sublayers(|sublayer| self.base.numbers[sublayer as usize])
    }

    /// Those of them that so many tokens go through: they alone are widened.
    pub(crate) fn widened_by(&self, tokens: f64) -> u64 {
        let unused = match self.base.numbers[Sublayer::Experts as usize] {
            0 => 0,
            _ => self.experts.unused_of(self.experts.matrices, tokens),
        };
        self.in_few_bits() - unused
    }

    /// Numbers of the body that are read as they are while completions are sampled: of experts and their adapters, and
    /// in few bits.
    pub(crate) fn read_in_place(&self) -> u64 {
        let matrices = match self.base.numbers[Sublayer::Experts as usize] {
            0 => self.experts.matrices,
            _ => 0,
        };
        self.in_few_bits() + self.experts.layers.count() * (matrices + self.experts.adapters)
    }

    /// A sum over all sublayers of the body.
    fn over_sublayers(&self, of: impl Fn(Sublayer) -> u64) -> u64 {
        let all = Sublayer::ALL.into_iter();
        all.map(|sublayer| self.count(sublayer) * of(sublayer)).sum()
    }

    /// Whether the head's projection is the embedding; not on a stage without the head.
    pub(crate) fn is_tied(&self) -> bool {
        self.head < self.projection
    }

    /// Whether weights are rounded copies of f32 masters.
    pub(crate) fn is_half(&self) -> bool {
        self.width < F32
    }

    /// Parameters of a unit of the body that are trained.
    pub(crate) fn trained_unit(&self, index: usize) -> u64 {
        match self.adapters {
            None => self.unit(index),
            Some(each) => each[self.sublayer(index) as usize],
        }
    }

    /// Parameters that are trained.
    #[must_use]
    pub fn trained(&self) -> u64 {
        match self.adapters {
            None => self.total(),
            Some(each) => self.over_sublayers(|sublayer| each[sublayer as usize]) + self.value,
        }
    }

    /// Whether embedding and head are trained: `numbers` of theirs, or none.
    pub(crate) fn trained_ends(&self, numbers: u64) -> u64 {
        if self.adapters.is_some() { 0 } else { numbers }
    }

    /// Halves of a kind.
    pub(crate) fn count(&self, sublayer: Sublayer) -> u64 {
        let (linear, experts) = (self.linear_layers.count(), self.experts.layers.count());
        match sublayer {
            Sublayer::Attention => self.layers - linear,
            Sublayer::Linear => linear,
            Sublayer::Mlp => self.layers - experts,
            Sublayer::Experts => experts,
        }
    }

    /// The kinds of sublayers that there are.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = Sublayer> {
        Sublayer::ALL.into_iter().filter(|sublayer| self.count(*sublayer) > 0)
    }

    /// Everything between embedding and head that one token goes through.
    #[must_use]
    pub fn active_body(&self) -> u64 {
        self.body() - self.experts.unused(1.0)
    }

    /// Everything between embedding and head.
    pub(crate) fn body(&self) -> u64 {
        self.over_sublayers(|sublayer| self.sublayer_elements(sublayer))
    }

    /// Embedding and head.
    pub(crate) fn ends(&self) -> u64 {
        self.embedding + self.head
    }

    /// All parameters, tied ones once.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.body() + self.ends()
    }

    /// Bytes of the largest unit that devices share out under ZeRO-3: tied ends are whole on each of them.
    pub(crate) fn largest_shared_unit(&self) -> u64 {
        let body = self.kinds().map(|sublayer| self.sublayer_bytes(sublayer));
        let ends = if self.is_tied() { 0 } else { self.width * self.embedding.max(self.head) };
        body.max().unwrap_or(0).max(ends)
    }

    fn sublayer_elements(&self, sublayer: Sublayer) -> u64 {
        self.sublayers[sublayer as usize]
    }

    /// A unit of the body by its index in the chain: mixers are odd, feed-forward sublayers even.
    pub(crate) fn unit(&self, index: usize) -> u64 {
        self.sublayer_elements(self.sublayer(index))
    }

    /// What a unit of the body is.
    pub(crate) fn sublayer(&self, unit: usize) -> Sublayer {
        let layer = (unit - 1) / 2;
        if !is_mixer(unit) {
            if self.experts.layers.has(layer) { Sublayer::Experts } else { Sublayer::Mlp }
        } else if self.linear_layers.has(layer) {
            Sublayer::Linear
        } else {
            Sublayer::Attention
        }
    }
}

/// A sublayer: a mixer or a feed-forward network with its norms and residual connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sublayer {
    /// Norm, q/k/v, attention, output projection.
    Attention,
    /// Norm, gated `DeltaNet`, output projection.
    Linear,
    /// Norm, gated MLP.
    Mlp,
    /// Norm, router, experts.
    Experts,
}

impl Sublayer {
    /// All kinds.
    pub const ALL: [Self; SUBLAYERS] = [Self::Attention, Self::Linear, Self::Mlp, Self::Experts];

    /// Those of some layers that have it.
    fn layers(self, arch: &Arch, layers: Range<usize>) -> impl Iterator<Item = usize> {
        layers.filter(move |&layer| match self {
            Self::Attention => arch.mixers.get(layer) == Some(&Mixer::Attention),
            Self::Linear => arch.mixers.get(layer) == Some(&Mixer::GatedDeltaNet),
            Self::Mlp => arch.experts(layer).is_none(),
            Self::Experts => arch.experts(layer).is_some(),
        })
    }

    /// The first unit of the kind in some layers.
    pub(crate) fn unit(self, arch: &Arch, layers: Range<usize>) -> Option<UnitKind> {
        let layer = self.layers(arch, layers).next()?;
        Some(match self {
            Self::Attention | Self::Linear => UnitKind::Attention(layer),
            Self::Mlp | Self::Experts => UnitKind::Mlp(layer),
        })
    }
}

/// Whether a unit of the body is a mixer: the chain is embedding, (mixer, feed-forward) × layers, head.
fn is_mixer(unit: usize) -> bool {
    unit % 2 == 1
}
