//! A decoder: a chain of units with their weights on a device.

mod adapters;
mod packing;
mod value;

pub use packing::{Packing, Quantization};

use crate::Result;
use crate::adapter::LoraConfig;
use crate::arch::Arch;
use crate::attention::{self, Projected, Scoring, Sequences};
use crate::cache::{KvCache, Reach};
use crate::head::Head;
use crate::layer::{self, Context};
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, Weights, chain, unit_specs};
use burn::tensor::{Device, Int, Tensor};
use firebrick_backends::accounts::Home;
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::HostTensor;
use firebrick_backends::{Precision, PrecisionExt};
use std::ops::Range;
use std::sync::Arc;

/// Words of a seed's streams are told apart by purpose: this one starts weights.
const INIT_STREAM: u64 = 1 << 32;

/// One link of the chain, its parameters' names and values.
#[derive(Clone, Debug)]
pub struct Unit {
    /// What it computes.
    pub kind: UnitKind,
    /// Its parameters, in order.
    pub specs: Vec<ParamSpec>,
    /// Their values, in the same order.
    pub store: Store,
    /// Where its parameters stand in the decoder's flat order.
    pub range: Range<usize>,
}

/// The weights of a unit that live on the host.
pub type HostWeights = Vec<(Slot, HostTensor)>;

/// Where a unit's weights are.
#[derive(Clone, Debug)]
pub enum Store {
    /// On the device.
    Device(Weights),
    /// On the host; they visit the device while the unit runs.
    Host(Arc<HostWeights>),
}

impl Store {
    /// Where that is.
    #[must_use]
    pub fn home(&self) -> Home {
        match self {
            Self::Device(_) => Home::Device,
            Self::Host(_) => Home::Host,
        }
    }

    /// The weights on the device: those that are there, or a copy of the host's.
    #[must_use]
    pub fn fetch(&self, device: &Device) -> Weights {
        match self {
            Self::Device(weights) => weights.clone(),
            Self::Host(host) => Weights::new(
                host.iter()
                    .map(|(slot, value)| (*slot, value.upload(device)))
                    .collect(),
            ),
        }
    }

    /// Bytes of the weights.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Device(weights) => weights.tensors().map(tensor_bytes).sum(),
            Self::Host(host) => host.iter().map(|(_, value)| value.bytes()).sum(),
        }
    }
}

/// Bytes of a matrix's values.
fn tensor_bytes(tensor: &Tensor<2>) -> usize {
    let [rows, cols] = tensor.dims();
    rows * cols * tensor.dtype().size()
}

/// The value of one parameter, where it lives.
#[derive(Clone, Debug)]
pub enum Param {
    /// On the device.
    Device(Tensor<2>),
    /// On the host.
    Host(HostTensor),
}

impl Param {
    /// Where it lives.
    #[must_use]
    pub fn home(&self) -> Home {
        match self {
            Self::Device(_) => Home::Device,
            Self::Host(_) => Home::Host,
        }
    }

    /// The precision that it is stored in.
    #[must_use]
    pub fn precision(&self) -> Precision {
        match self {
            Self::Device(tensor) => Precision::of(tensor.dtype()),
            Self::Host(own) => own.precision(),
        }
    }

    /// A copy of its values on the host.
    pub fn download(&self) -> Result<HostTensor> {
        match self {
            Self::Device(tensor) => Ok(HostTensor::download(tensor.clone())?),
            Self::Host(host) => Ok(host.clone()),
        }
    }

    /// Its values as a tensor on the device.
    #[must_use]
    pub fn upload(&self, device: &Device) -> Tensor<2> {
        match self {
            Self::Device(tensor) => tensor.clone(),
            Self::Host(host) => host.upload(device),
        }
    }
}

impl Unit {
    /// Whether training changes any of its parameters.
    #[must_use]
    pub fn trains(&self) -> bool {
        self.specs.iter().any(|spec| spec.trainable)
    }

    /// Its weights, fetched from wherever they are, as leaves of a graph: those that train ask for a gradient, the others are
    /// constants.
    #[must_use]
    pub fn leaves(&self, weights: &Weights) -> Weights {
        let leaf = |((slot, weight), spec): ((Slot, Tensor<2>), &ParamSpec)| {
            let leaf = if spec.trainable {
                weight.autodiff().require_grad()
            } else {
                weight
            };
            (slot, leaf)
        };
        let entries = weights.clone().into_entries().zip(&self.specs);
        Weights::new(entries.map(leaf).collect())
    }
}

/// A language model as a chain of units: embedding, (attention, MLP) × layers, head.
///
/// Cloning is cheap: weights are shared until they are replaced.
#[derive(Clone, Debug)]
pub struct Decoder {
    arch: Arch,
    units: Vec<Unit>,
    device: Device,
    lora: Option<LoraConfig>,
    /// Whether the bypasses run.
    adapters_on: bool,
}

impl Decoder {
    /// Builds the chain, asking `value` for every parameter in flat order, and stores it in the architecture's precision.
    pub fn build<E>(
        arch: Arch,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<Tensor<2>, E>,
    ) -> Result<Self, E> {
        let dtype = arch.precision.dtype(device);
        let mut units = Vec::new();
        let mut next = 0;
        for kind in chain(&arch) {
            let specs = unit_specs(&arch, kind);
            let range = next..next + specs.len();
            next = range.end;
            let entries = specs
                .iter()
                .zip(range.clone())
                .map(|(spec, index)| Ok((spec.slot, stored_as(value(index, spec)?, dtype))))
                .collect::<Result<Vec<_>, E>>()?;
            units.push(Unit {
                kind,
                specs,
                store: Store::Device(Weights::new(entries)),
                range,
            });
        }
        Ok(Self {
            arch,
            units,
            device: device.clone(),
            lora: None,
            adapters_on: true,
        })
    }

    /// A random start: matrices normal with the architecture's `initializer_range`, norms the identity, biases zero.
    /// The numbers depend on the seed and the parameter alone.
    #[must_use]
    pub fn random(arch: Arch, seed: u64, device: &Device) -> Self {
        let (std, norm) = (
            arch.initializer_range as f32,
            if arch.norm_offset { 0.0 } else { 1.0 },
        );
        let precision = arch.precision;
        let built = Self::build(arch, device, |index, spec| {
            let values: Vec<f32> = if spec.slot.is_norm() {
                vec![norm; spec.numel()]
            } else if spec.slot.is_norm_or_bias() {
                vec![0.0; spec.numel()]
            } else {
                let mut stream = Stream::new(seed, INIT_STREAM + index as u64);
                (0..spec.numel()).map(|_| stream.normal() * std).collect()
            };
            Ok::<_, std::convert::Infallible>(precision.matrix(values, spec.rows_cols(), device))
        });
        match built {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
    }

    /// A copy of this model with its weights rounded to another precision, on the device.
    #[must_use]
    pub fn in_precision(&self, precision: Precision) -> Self {
        let mut decoder = self.clone();
        decoder.arch.precision = precision;
        let dtype = precision.dtype(&self.device);
        for unit in &mut decoder.units {
            let weights = unit.store.fetch(&self.device);
            unit.store = Store::Device(weights.map(|w| stored_as(w.clone(), dtype)));
        }
        decoder
    }

    /// The architecture.
    #[must_use]
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// The device its weights live on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The chain.
    #[must_use]
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// All parameters' specs in flat order.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|u| &u.specs)
    }

    /// All parameters in flat order, where they live. Host values are copied as the iterator reaches them.
    pub fn params(&self) -> impl Iterator<Item = (&ParamSpec, Param)> {
        self.specs()
            .enumerate()
            .map(|(index, spec)| (spec, self.param(index)))
    }

    /// One parameter by its place in the flat order. A host value is copied.
    #[must_use]
    pub fn param(&self, index: usize) -> Param {
        let unit = &self.units[self.units.partition_point(|u| u.range.end <= index)];
        let place = index - unit.range.start;
        match &unit.store {
            Store::Device(weights) => Param::Device(weights.at(place)),
            Store::Host(host) => Param::Host(host[place].1.clone()),
        }
    }

    /// Number of parameters, tied ones counted once.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.specs().map(ParamSpec::numel).sum()
    }

    /// Number of parameters that training changes.
    #[must_use]
    pub fn num_trainable(&self) -> usize {
        let trainable = self.specs().filter(|spec| spec.trainable);
        trainable.map(ParamSpec::numel).sum()
    }

    /// Flat index of the matrix that the head projects with: the embedding's where they are tied.
    #[must_use]
    pub fn projection_index(&self) -> usize {
        if self.arch.tied {
            0
        } else {
            self.units[self.units.len() - 1].range.start + 1
        }
    }

    /// Replaces every parameter: `f(flat index, spec, value)` gives its new value, in the same home.
    pub fn update<E>(
        &mut self,
        mut f: impl FnMut(usize, &ParamSpec, Param) -> Result<Param, E>,
    ) -> Result<(), E> {
        (0..self.units.len()).try_for_each(|unit| self.update_unit(unit, &mut f))
    }

    /// Replaces the parameters of one unit. Values leave the unit while they are replaced, so that nothing is held twice:
    /// after an error the decoder lacks the parameter at which it happened and is of no further use.
    pub fn update_unit<E>(
        &mut self,
        unit: usize,
        mut f: impl FnMut(usize, &ParamSpec, Param) -> Result<Param, E>,
    ) -> Result<(), E> {
        let unit = &mut self.units[unit];
        for (i, (spec, index)) in unit.specs.iter().zip(unit.range.clone()).enumerate() {
            match &mut unit.store {
                Store::Device(weights) => {
                    let value = weights.take(i);
                    match f(index, spec, Param::Device(value))? {
                        Param::Device(new) => weights.put(i, new),
                        Param::Host(_) => unreachable!("a parameter stays where it lives"),
                    }
                }
                Store::Host(host) => {
                    let host = Arc::make_mut(host);
                    let empty = HostTensor::from_values(Vec::new(), [0, 0]);
                    let value = std::mem::replace(&mut host[i].1, empty);
                    match f(index, spec, Param::Host(value))? {
                        Param::Host(new) => host[i].1 = new,
                        Param::Device(_) => unreachable!("a parameter stays where it lives"),
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves a unit's weights; the copy they leave behind is freed.
    pub fn move_unit(&mut self, unit: usize, home: Home) -> Result<()> {
        let store = &mut self.units[unit].store;
        match (&*store, home) {
            (Store::Device(weights), Home::Host) => {
                let host = weights
                    .clone()
                    .into_entries()
                    .map(|(slot, value)| {
                        let mut host = HostTensor::download(value)?;
                        host.pin(&self.device);
                        Ok((slot, host))
                    })
                    .collect::<Result<HostWeights>>()?;
                *store = Store::Host(Arc::new(host));
            }
            (Store::Host(_), Home::Device) => {
                *store = Store::Device(store.fetch(&self.device));
            }
            _ => {}
        }
        Ok(())
    }

    /// Moves all weights.
    pub fn move_to(&mut self, home: Home) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.move_unit(unit, home))
    }

    /// Bytes of all weights that live in `home`.
    #[must_use]
    pub fn bytes_in(&self, home: Home) -> usize {
        let there = self.units.iter().filter(|u| u.store.home() == home);
        there.map(|u| u.store.bytes()).sum()
    }

    /// A unit's weights on the device.
    #[must_use]
    pub fn weights(&self, unit: usize) -> Weights {
        self.units[unit].store.fetch(&self.device)
    }

    /// Embeds token ids `[tokens]`: `[tokens, hidden]`.
    #[must_use]
    pub fn embed(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        self.embed_with(&self.weights(0), ids)
    }

    /// The same with the embedding's weights given from outside.
    #[must_use]
    pub fn embed_with(&self, weights: &Weights, ids: Tensor<1, Int>) -> Tensor<2> {
        layer::embed(&self.arch, weights.need(Slot::Embedding), ids)
    }

    /// Runs one unit between embedding and head on rows `[tokens, hidden]`, with weights given from
    /// outside (leaves of a graph, or fetched from elsewhere). The only place that knows what units do.
    #[must_use]
    pub fn run(&self, unit: usize, weights: &Weights, x: Tensor<2>, ctx: &Context) -> Tensor<2> {
        match self.units[unit].kind {
            UnitKind::Attention(layer) => {
                let bypass = self.bypass(layer, ctx);
                layer::attention(&self.arch, layer, weights, x, ctx, bypass, None)
            }
            UnitKind::Mlp(layer) => layer::mlp(&self.arch, weights, x, self.bypass(layer, ctx)),
            UnitKind::Embedding | UnitKind::Head => {
                unreachable!("embedding and head are run by name")
            }
        }
    }

    /// Indices of the units between embedding and head.
    #[must_use]
    pub fn body(&self) -> Range<usize> {
        1..self.units.len() - 1
    }

    /// Hidden rows after the last layer, `[tokens, hidden]`, without a graph.
    #[must_use]
    pub fn hidden(&self, ids: Tensor<1, Int>, ctx: &Context) -> Tensor<2> {
        self.body().fold(self.embed(ids), |x, unit| {
            self.run(unit, &self.weights(unit), x, ctx)
        })
    }

    /// The same for new columns of sequences whose earlier ones are in `cache`.
    pub fn hidden_cached(
        &self,
        ids: Tensor<1, Int>,
        ctx: &Context,
        cache: &mut KvCache,
    ) -> Tensor<2> {
        let reach = Reach::new(&self.arch, cache, ctx.len, &self.device);
        let mut x = self.embed(ids);
        for index in self.body() {
            let weights = self.weights(index);
            x = match self.units[index].kind {
                UnitKind::Attention(i) => {
                    let (bypass, cache) = (self.bypass(i, ctx), Some((cache.layer(i), &reach)));
                    layer::attention(&self.arch, i, &weights, x, ctx, bypass, cache)
                }
                _ => self.run(index, &weights, x, ctx),
            };
        }
        cache.advance(ctx.len);
        x
    }

    /// The head.
    #[must_use]
    pub fn head(&self) -> Head<'_> {
        self.head_with(&self.weights(self.units.len() - 1))
    }

    /// The head with its unit's weights given from outside; a tied projection comes from the embedding.
    #[must_use]
    pub fn head_with(&self, weights: &Weights) -> Head<'_> {
        let (projection, panels) = match weights.get(Slot::Projection) {
            Some(own) => (own, weights.panels(Slot::Projection).cloned()),
            None => {
                let embedding = self.weights(0);
                let panels = embedding.panels(Slot::Embedding).cloned();
                (embedding.need(Slot::Embedding), panels)
            }
        };
        let own = &self.units[self.units.len() - 1].specs;
        let trainable = own.iter().any(|s| s.slot == Slot::InputNorm && s.trainable);
        Head {
            arch: &self.arch,
            norm: weights.need(Slot::InputNorm),
            projection,
            panels,
            bias: weights.get(Slot::ProjectionBias),
            value: weights.get(Slot::Value),
            trainable,
            projection_trains: trainable,
        }
    }

    /// What a unit computes.
    #[must_use]
    pub fn kind(&self, unit: usize) -> UnitKind {
        self.units[unit].kind
    }

    /// The first part of an attention unit: queries, keys and values, `[tokens, heads, head_dim]` each.
    #[must_use]
    pub fn project(
        &self,
        unit: usize,
        weights: &Weights,
        x: Tensor<2>,
        ctx: &Context,
    ) -> Projected {
        let bypass = self.unit_bypass(unit, ctx);
        layer::project(&self.arch, weights, x, ctx, bypass)
    }

    /// The middle part, over whole sequences: mixed values, `[tokens, heads · head_dim]`.
    #[must_use]
    pub fn attend(&self, unit: usize, qkv: &Projected, ctx: &Context) -> Tensor<2> {
        let (scoring, sequences) = self.attention(unit, ctx);
        attention::attend(qkv, scoring, sequences)
    }

    /// Gradients of queries, keys and values, given the mixed values and their gradient.
    #[must_use]
    pub fn attend_backward(
        &self,
        unit: usize,
        qkv: &Projected,
        mixed: Tensor<2>,
        d_mixed: Tensor<2>,
        ctx: &Context,
    ) -> Projected {
        let (scoring, sequences) = self.attention(unit, ctx);
        attention::attend_backward(qkv, mixed, d_mixed, scoring, sequences)
    }

    fn attention<'c>(&self, unit: usize, ctx: &'c Context) -> (Scoring, &'c Sequences) {
        match (self.units[unit].kind, ctx.sequences()) {
            (UnitKind::Attention(layer), Some(all)) => (layer::scoring(&self.arch, layer), all),
            _ => unreachable!("attention of whole sequences is asked of an attention unit"),
        }
    }

    /// The last part: output projection and residual, from mixed values `[tokens, heads · head_dim]`.
    #[must_use]
    pub fn merge(
        &self,
        unit: usize,
        weights: &Weights,
        x: Tensor<2>,
        mixed: &Tensor<2>,
        ctx: &Context,
    ) -> Tensor<2> {
        let bypass = self.unit_bypass(unit, ctx);
        layer::merge(&self.arch, weights, x, mixed, bypass)
    }
}
