//! Numbers of parameters, by what holds them.

use crate::estimate::{BaseSizes, ExpertSizes, LayerSet, SUBLAYERS};
use firebrick_arch::arch::Mixer;
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::parameters::{ParamSpec, Slot, UnitKind, unit_specs};
use firebrick_arch::{Arch, PipelineStage};
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
    /// Rows up to which a matmul widens numbers as it reads them. With more the matrix is widened first.
    pub max_fused_rows: u64,
    /// True if such a matmul is in the precision that is sampled in, on tensor cores; it is in f32 elsewhere.
    pub tensor_cores: bool,
}

impl QuantizedWeights {
    /// The matrices of an architecture's layers, sampled in weights of `width` bytes.
    pub fn new(arch: &Arch, profile: &DeviceProfile, width: u64) -> Self {
        let shapes: Vec<([usize; 2], u64)> = sublayers(arch)
            .flat_map(|(sublayer, count)| unit_specs(arch, sublayer).into_iter().map(move |spec| (spec, count)))
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
    /// One sublayer of each kind; none if there are no such layers.
    sublayers: [u64; SUBLAYERS],
    experts: ExpertSizes,
    /// Final norm and, where it is not the embedding, the projection.
    pub head: u64,
    /// Layers.
    pub layers: u64,
    /// The largest matrix.
    pub largest: u64,
    /// The head's projection, tied or not; 0 on a stage without the head.
    pub projection: u64,
    /// Which layers have linear attention.
    linear_layers: LayerSet,
    /// Adapters of each kind of sublayer, where they alone are trained.
    adapters: Option<[u64; SUBLAYERS]>,
    /// The value head beside the projection, which trains beside adapters too.
    value: u64,
    /// The largest matrix that is trained.
    pub largest_trained: u64,
    /// Bytes of a weight that is not quantized.
    pub width: u64,
    /// Quantized matrices of layers.
    pub(crate) base: BaseSizes,
}

impl Sizes {
    /// Counts an architecture's parameters. With adapters they alone are trained.
    pub fn new(arch: &Arch, lora: Option<&LoraConfig>) -> Self {
        Self::for_stage(arch, lora, None)
    }

    /// Counts the parameters of a pipeline stage; a tied matrix is on the first and on the last.
    pub(crate) fn for_stage(arch: &Arch, lora: Option<&LoraConfig>, stage: Option<PipelineStage>) -> Self {
        let layers = stage.map_or(0..arch.num_layers, |stage| stage.layers(arch.num_layers));
        let has = |end: UnitKind| stage.is_none_or(|stage| stage.has(arch, end));
        let specs = |kind| {
            let mut specs = unit_specs(arch, kind);
            let adapters = lora.map_or_else(Vec::new, |l| l.specs(&specs));
            specs.extend(adapters);
            specs
        };
        let trained = |spec: &&ParamSpec| lora.is_none() || spec.slot.is_adapter() || spec.slot == Slot::Value;
        let count = |specs: &[ParamSpec]| specs.iter().map(|s| s.numel() as u64).sum::<u64>();
        let adapters =
            |specs: &[ParamSpec]| specs.iter().filter(|s| s.slot.is_adapter()).map(|s| s.numel() as u64).sum::<u64>();
        let ends = [UnitKind::Embedding, UnitKind::Head].map(|end| if has(end) { specs(end) } else { Vec::new() });
        let sublayers = Sublayer::ALL.map(|sublayer| sublayer.unit(arch, layers.clone()).map_or_else(Vec::new, specs));
        let specs = || ends.iter().chain(&sublayers).flatten();
        let largest =
            |specs: &mut dyn Iterator<Item = &ParamSpec>| specs.map(ParamSpec::numel).max().unwrap_or(0) as u64;
        let projection = if has(UnitKind::Head) { arch.head_width() * arch.hidden_size } else { 0 };
        let sublayers = sublayers.each_ref().map(Vec::as_slice);
        Self {
            embedding: count(&ends[0]),
            sublayers: sublayers.map(count),
            linear_layers: LayerSet::new(Sublayer::Linear.layers(arch, layers.clone())),
            experts: ExpertSizes::new(arch, &layers, sublayers[Sublayer::Experts as usize]),
            head: count(&ends[1]),
            layers: layers.len() as u64,
            largest: largest(&mut specs()),
            projection: projection as u64,
            adapters: lora.map(|_| sublayers.map(adapters)),
            value: if arch.joint_value_head && has(UnitKind::Head) { arch.hidden_size as u64 } else { 0 },
            largest_trained: largest(&mut specs().filter(trained)),
            width: arch.precision.width(),
            base: BaseSizes::new(arch, sublayers),
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

    /// Bytes of all parameters that `tokens` tokens use.
    pub(crate) fn used_bytes(&self, tokens: u64) -> u64 {
        let sublayer = Sublayer::Experts as usize;
        // a shared expert's codes have as many bytes per number as those of the others
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

    /// Numbers of the body that are quantized.
    pub(crate) fn quantized_elements(&self) -> u64 {
        self.over_sublayers(|sublayer| self.base.numbers[sublayer as usize])
    }

    /// Quantized elements that `tokens` tokens use, which are dequantized.
    pub(crate) fn dequantized_elements(&self, tokens: f64) -> u64 {
        let unused = match self.base.numbers[Sublayer::Experts as usize] {
            0 => 0,
            _ => self.experts.unused_of(self.experts.matrices, tokens),
        };
        self.quantized_elements() - unused
    }

    /// Numbers of the body that are read as they are while completions are sampled: of experts and their adapters, and
    /// quantized.
    pub(crate) fn read_in_place(&self) -> u64 {
        let matrices = match self.base.numbers[Sublayer::Experts as usize] {
            0 => self.experts.matrices,
            _ => 0,
        };
        self.quantized_elements() + self.experts.layers.count() * (matrices + self.experts.adapters)
    }

    /// A sum over all sublayers of the body.
    fn over_sublayers(&self, of: impl Fn(Sublayer) -> u64) -> u64 {
        Sublayer::ALL.into_iter().map(|sublayer| self.count(sublayer) * of(sublayer)).sum()
    }

    /// True if the head's projection is the embedding; not on a stage without the head.
    pub(crate) fn is_tied(&self) -> bool {
        self.head < self.projection
    }

    /// True if weights are rounded copies of f32 masters.
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
    pub fn trained(&self) -> u64 {
        match self.adapters {
            None => self.total(),
            Some(each) => self.over_sublayers(|sublayer| each[sublayer as usize]) + self.value,
        }
    }

    /// Trained elements of embedding and head: all of `numbers`, or none with adapters.
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
    pub fn total(&self) -> u64 {
        self.body() + self.ends()
    }

    /// Bytes of the largest unit that devices shard under ZeRO-3: tied ends are whole on each of them.
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

    /// The kind of a unit of the body.
    pub(crate) fn sublayer(&self, unit: usize) -> Sublayer {
        let layer = (unit - 1) / 2;
        if unit.is_multiple_of(2) {
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
