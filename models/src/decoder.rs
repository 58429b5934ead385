//! A decoder: a chain of units with their weights on a device.

use crate::arch::Arch;
use crate::cache::KvCache;
use crate::head::Head;
use crate::layer::{self, Context};
use crate::random::Stream;
use crate::unit::{ParamSpec, Slot, UnitKind, Weights, chain, unit_specs};
use burn::tensor::{Device, Int, Tensor, TensorData};
use std::ops::Range;

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
    pub weights: Weights,
    /// Where its parameters stand in the decoder's flat order.
    pub range: Range<usize>,
}

/// A language model as a chain of units: embedding, (attention, MLP) × layers, head.
///
/// Cloning is cheap: weights are shared until they are replaced.
#[derive(Clone, Debug)]
pub struct Decoder {
    arch: Arch,
    units: Vec<Unit>,
    device: Device,
}

impl Decoder {
    /// Builds the chain, asking `value` for every parameter in flat order.
    pub fn build<E>(
        arch: Arch,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<Tensor<2>, E>,
    ) -> Result<Self, E> {
        let mut units = Vec::new();
        let mut next = 0;
        for kind in chain(&arch) {
            let specs = unit_specs(&arch, kind);
            let range = next..next + specs.len();
            next = range.end;
            let entries = specs
                .iter()
                .zip(range.clone())
                .map(|(spec, index)| Ok((spec.slot, value(index, spec)?)))
                .collect::<Result<Vec<_>, E>>()?;
            units.push(Unit {
                kind,
                specs,
                weights: Weights::new(entries),
                range,
            });
        }
        Ok(Self {
            arch,
            units,
            device: device.clone(),
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
        let built = Self::build(arch, device, |index, spec| {
            let values: Vec<f32> = if spec.slot.is_norm() {
                vec![norm; spec.numel()]
            } else if spec.slot.is_norm_or_bias() {
                vec![0.0; spec.numel()]
            } else {
                let mut stream = Stream::new(seed, INIT_STREAM + index as u64);
                (0..spec.numel()).map(|_| stream.normal() * std).collect()
            };
            Ok::<_, std::convert::Infallible>(Tensor::from_data(
                TensorData::new(values, spec.rows_cols()),
                device,
            ))
        });
        match built {
            Ok(decoder) => decoder,
            Err(never) => match never {},
        }
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

    /// All parameters in flat order.
    pub fn params(&self) -> impl Iterator<Item = (&ParamSpec, &Tensor<2>)> {
        self.units
            .iter()
            .flat_map(|u| u.specs.iter().zip(u.weights.tensors()))
    }

    /// Number of parameters, tied ones counted once.
    #[must_use]
    pub fn num_params(&self) -> usize {
        self.specs().map(ParamSpec::numel).sum()
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

    /// Replaces every parameter: `f(flat index, spec, value)` gives its new value.
    pub fn update(&mut self, mut f: impl FnMut(usize, &ParamSpec, Tensor<2>) -> Tensor<2>) {
        for unit in &mut self.units {
            let weights = std::mem::replace(&mut unit.weights, Weights::new(Vec::new()));
            let entries = weights
                .into_entries()
                .zip(unit.specs.iter().zip(unit.range.clone()))
                .map(|((slot, value), (spec, index))| (slot, f(index, spec, value)))
                .collect();
            unit.weights = Weights::new(entries);
        }
    }

    /// Embeds token ids `[tokens]`: `[tokens, hidden]`.
    #[must_use]
    pub fn embed(&self, ids: Tensor<1, Int>) -> Tensor<2> {
        layer::embed(&self.arch, self.units[0].weights.need(Slot::Embedding), ids)
    }

    /// Runs one unit between embedding and head on rows `[tokens, hidden]`, with weights given from
    /// outside (leaves of a graph, or fetched from elsewhere). The only place that knows what units do.
    #[must_use]
    pub fn run(&self, unit: usize, weights: &Weights, x: Tensor<2>, ctx: &Context) -> Tensor<2> {
        match self.units[unit].kind {
            UnitKind::Attention(layer) => {
                layer::attention(&self.arch, layer, weights, x, ctx, None)
            }
            UnitKind::Mlp(_) => layer::mlp(&self.arch, weights, x),
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
            self.run(unit, &self.units[unit].weights, x, ctx)
        })
    }

    /// The same for new columns of sequences whose earlier ones are in `cache`.
    #[must_use]
    pub fn hidden_cached(
        &self,
        ids: Tensor<1, Int>,
        ctx: &Context,
        cache: &mut KvCache,
    ) -> Tensor<2> {
        let mut x = self.embed(ids);
        for unit in &self.units[self.body()] {
            x = match unit.kind {
                UnitKind::Attention(i) => {
                    layer::attention(&self.arch, i, &unit.weights, x, ctx, Some(cache.layer(i)))
                }
                _ => layer::mlp(&self.arch, &unit.weights, x),
            };
        }
        x
    }

    /// The head.
    #[must_use]
    pub fn head(&self) -> Head<'_> {
        let unit = &self.units[self.units.len() - 1];
        let projection = match unit.weights.get(Slot::Projection) {
            Some(own) => own,
            None => self.units[0].weights.need(Slot::Embedding),
        };
        Head {
            arch: &self.arch,
            norm: unit.weights.need(Slot::InputNorm),
            projection,
            bias: unit.weights.get(Slot::ProjectionBias),
        }
    }
}
