//! A decoder: a chain of units with their weights.

mod adapters;
mod decode;
mod exact;
mod forward;
mod init;
mod prepack;
mod quantized;
mod rank_shard;
mod sampling_shard;
mod shard_slice;
mod stage;
mod training_shard;
mod unit_store;
mod value_head;

pub use rank_shard::{RankShard, ValueRange};
pub use shard_slice::ShardSlice;
pub use unit_store::{HostWeights, NewParam, Param, Store, Unit};
pub(crate) use value_head::fresh_head;

use crate::Result;
use crate::adapter::LoraConfig;
use crate::arch::Arch;
use crate::tensor_group::TensorGroup;
use crate::unit::{ParamSpec, UnitKind, chain, unit_specs};
use crate::weights::{WeightKey, Weights};
use burn::tensor::{Device, Tensor};
use firebrick_arch::PipelineStage;
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels;
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::{HostTensor, check_computed};
use firebrick_backends::{Precision, PrecisionExt};
use shard_slice::TrainingShard;
use std::ops::Range;
use std::sync::Arc;

/// A language model as a chain of units: embedding, (attention, MLP) × layers, head.
///
/// Cloning is cheap: weights are shared until they are replaced.
#[derive(Clone, Debug)]
pub struct Decoder {
    arch: Arch,
    units: Vec<Unit>,
    device: Device,
    lora: Option<LoraConfig>,
    /// True if adapters run.
    adapters_on: bool,
    /// The ranks that share its matrices, where it is a [share](Self::sampling_shard).
    tensor: Option<TensorGroup>,
    /// Which share of which model it is, where it is one that is [trained](Self::training_shard).
    share: Option<Arc<TrainingShard>>,
    /// Which stage of a pipeline trains it, where one does.
    stage: Option<PipelineStage>,
    /// True if forward passes are [exact](kernels::exact()).
    exact: bool,
}

impl Decoder {
    /// Builds a decoder on a device in the architecture's precision. `value(flat index, spec)` gives every parameter,
    /// in flat order, in the shape of [`ParamSpec::rows_cols`], or as the buffer of its [layout](ParamSpec::layout).
    /// The latter are not trained.
    ///
    /// # Errors
    /// The first that `value` gives.
    pub fn build<E, V: Into<NewParam>>(
        arch: Arch,
        device: &Device,
        value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
    ) -> Result<Self, E> {
        Self::build_units(arch, device, value, |_, _| Ok(()))
    }

    /// [`Self::build`]; `built` is called with every unit, by its index, before the next one is built.
    fn build_units<E, V: Into<NewParam>>(
        arch: Arch,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
        mut built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let dtype = arch.precision.dtype(device);
        let mut decoder = Self::empty(arch, device);
        for (unit, kind) in chain(&decoder.arch).into_iter().enumerate() {
            let mut specs = unit_specs(&decoder.arch, kind);
            let entry = |(spec, index): (&mut ParamSpec, usize)| -> Result<(WeightKey, Tensor<2>), E> {
                let NewParam { layout, tensor } = value(index, spec)?.into();
                spec.trainable = layout.is_none();
                let slot = spec.slot;
                Ok(match layout {
                    Some(_) => (WeightKey { slot, layout }, tensor),
                    None => (slot.into(), stored_as(tensor, dtype)),
                })
            };
            let entries = specs.iter_mut().zip(decoder.end()..).map(entry);
            let entries = entries.collect::<Result<Vec<_>, E>>()?;
            decoder.push_unit(kind, specs, Store::Device(Weights::new(entries)));
            built(&mut decoder, unit)?;
        }
        Ok(decoder)
    }

    /// A decoder without units.
    fn empty(arch: Arch, device: &Device) -> Self {
        Self {
            arch,
            units: Vec::new(),
            device: device.clone(),
            lora: None,
            adapters_on: true,
            tensor: None,
            share: None,
            stage: None,
            exact: false,
        }
    }

    /// The flat index after the last parameter.
    fn end(&self) -> usize {
        self.units.last().map_or(0, |unit| unit.range.end)
    }

    /// Adds a unit behind the others.
    fn push_unit(&mut self, kind: UnitKind, specs: Vec<ParamSpec>, store: Store) {
        let first = self.end();
        self.units.push(Unit { kind, range: first..first + specs.len(), specs, store, sharded: false });
    }

    /// A copy on the device with weights rounded to another precision.
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
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// The device on which it runs.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The units in order.
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Specs of all parameters, in flat order.
    pub fn specs(&self) -> impl Iterator<Item = &ParamSpec> {
        self.units.iter().flat_map(|u| &u.specs)
    }

    /// All parameters in flat order. Values in host memory are copied as the iterator reaches them.
    pub fn params(&self) -> impl Iterator<Item = (&ParamSpec, Param)> {
        self.specs().enumerate().map(|(index, spec)| (spec, self.param(index)))
    }

    /// The parameter at a flat index. A value in host memory is copied, and a frozen quantized matrix is widened to
    /// f32.
    pub fn param(&self, index: usize) -> Param {
        let (unit, place) = self.place(index);
        if let Some(layout) = unit.store.layout(place) {
            return self.widened_param(&unit.store, place, layout, 0..layout.matrices);
        }
        match &unit.store {
            Store::Device(weights) => Param::Device(weights.at(place)),
            Store::Host(host) => Param::Host(host[place].1.clone()),
        }
    }

    /// Number of parameters, tied ones counted once.
    pub fn num_params(&self) -> usize {
        self.specs().map(ParamSpec::numel).sum()
    }

    /// Number of parameters that are trained.
    pub fn num_trainable(&self) -> usize {
        self.specs().filter(|spec| spec.trainable).map(ParamSpec::numel).sum()
    }

    /// Flat index of the head's projection: the embedding's matrix where they are tied.
    pub fn projection_index(&self) -> usize {
        if self.arch.tied { 0 } else { self.units[self.units.len() - 1].range.start + 1 }
    }

    /// Replaces every parameter: `f(flat index, spec, value)` gives the new value, which stays where the old one was.
    /// Frozen quantized matrices are left as they are.
    ///
    /// # Errors
    /// The first that `f` gives.
    pub fn update<E>(&mut self, mut f: impl FnMut(usize, &ParamSpec, Param) -> Result<Param, E>) -> Result<(), E> {
        (0..self.units.len()).try_for_each(|unit| self.update_unit(unit, &mut f))
    }

    /// Replaces the parameters of one unit. `f` owns the value, so that it can be updated in place: after an error the
    /// decoder lacks that parameter and cannot be used any more.
    ///
    /// # Errors
    /// The first that `f` gives.
    pub fn update_unit<E>(
        &mut self,
        unit: usize,
        mut f: impl FnMut(usize, &ParamSpec, Param) -> Result<Param, E>,
    ) -> Result<(), E> {
        let unit = &mut self.units[unit];
        for (i, (spec, index)) in unit.specs.iter().zip(unit.range.clone()).enumerate() {
            if unit.store.layout(i).is_some() {
                continue;
            }
            let value = match &mut unit.store {
                Store::Device(weights) => Param::Device(weights.take(i)),
                Store::Host(host) => {
                    let empty = HostTensor::from_values(Vec::new(), [0, 0]);
                    Param::Host(std::mem::replace(&mut Arc::make_mut(host)[i].1, empty))
                }
            };
            match (&mut unit.store, f(index, spec, value)?) {
                (Store::Device(weights), Param::Device(new)) => weights.put(i, new),
                (Store::Host(host), Param::Host(mut new)) => {
                    new.pin(&self.device);
                    Arc::make_mut(host)[i].1 = new;
                }
                _ => unreachable!("a parameter stays on the device or on the host"),
            }
        }
        Ok(())
    }

    /// Keeps some values of each parameter of a unit, copied, where the whole ones lie: those that `part` says of so
    /// many, counted in row-major order, as a matrix of the shape that it says. The unit cannot run until it is
    /// [whole](Self::unshard_unit) again; other weights may be passed to where it runs.
    ///
    /// # Errors
    /// If memory runs out, or the device fails. The unit is then what it was.
    pub fn shard_unit(&mut self, unit: usize, part: impl Fn(usize) -> (Range<usize>, [usize; 2])) -> Result<()> {
        let current = &self.units[unit];
        let parts: Vec<Param> = current
            .specs
            .iter()
            .zip(current.range.clone())
            .map(|(spec, index)| {
                let (values, shape) = part(spec.numel());
                self.param(index).part(values, shape).detached()
            })
            .collect::<Result<_>>()?;
        check_computed(parts.iter().filter_map(|part| match part {
            Param::Device(tensor) if tensor.dims()[0] > 0 => Some(tensor.clone()),
            _ => None,
        }))?;
        self.put_unit(unit, parts)?;
        self.units[unit].sharded = true;
        Ok(())
    }

    /// Makes a unit whole again, with the values of all its parameters in their order, on the device or the host.
    ///
    /// # Errors
    /// If memory runs out, or the device fails. The unit is then what it was.
    pub fn unshard_unit(&mut self, unit: usize, values: Vec<Param>) -> Result<()> {
        let device = self.device.clone();
        let home = self.units[unit].store.home();
        let whole = values.into_iter().map(|value| match (home, value) {
            (Home::Device, value) => Ok(Param::Device(value.into_device(&device))),
            (Home::Host, Param::Device(value)) => Ok(Param::Host(HostTensor::download(value)?)),
            (Home::Host, value) => Ok(value),
        });
        let whole: Vec<Param> = whole.collect::<Result<_>>()?;
        check_computed(whole.iter().filter_map(|value| match value {
            Param::Device(tensor) => Some(tensor.clone()),
            Param::Host(_) => None,
        }))?;
        self.put_unit(unit, whole)?;
        self.units[unit].sharded = false;
        Ok(())
    }

    /// Waits until all weights on the device are where they were loaded to.
    ///
    /// # Errors
    /// If some are not, since memory ran out or the device failed.
    pub fn check_computed(&self) -> Result<()> {
        let resident = self.units.iter().filter_map(|unit| match &unit.store {
            Store::Device(weights) => Some(weights.clone().into_entries()),
            Store::Host(_) => None,
        });
        let weights = resident.flatten().map(|(_, value)| value);
        Ok(check_computed(weights.filter(|value| value.dims()[0] > 0))?)
    }

    /// Replaces all values of a unit.
    fn put_unit(&mut self, unit: usize, values: Vec<Param>) -> Result<()> {
        let mut values = values.into_iter();
        self.update_unit(unit, |_, _, value| Ok(values.next().unwrap_or(value)))
    }

    /// Gives every trained weight on the device a buffer of its own, one after the other: a model that was cloned
    /// shares its buffers, and an update of shared weights would allocate. Nothing to do on the CPU and for weights on
    /// the host.
    ///
    /// # Errors
    /// If memory runs out, or the device fails. The weights are then what they were, and this may be run again.
    pub fn own_trained_weights(&mut self) -> Result<()> {
        for unit in &mut self.units {
            let Store::Device(weights) = &mut unit.store else {
                continue;
            };
            let trained = unit.specs.iter().enumerate();
            for (i, _) in trained.filter(|(_, spec)| spec.trainable) {
                if weights.at(i).dims()[0] == 0 {
                    continue;
                }
                let copy = kernels::duplicate(&weights.at(i));
                check_computed([copy.clone()])?;
                weights.put(i, copy);
            }
        }
        Ok(())
    }

    /// Moves the weights of a unit to `home` and frees the old copy, once the new one is there.
    ///
    /// # Errors
    /// If memory runs out there, or the device fails. The weights are then where they were.
    pub fn move_unit(&mut self, unit: usize, home: Home) -> Result<()> {
        let store = &mut self.units[unit].store;
        match (&*store, home) {
            (Store::Device(weights), Home::Host) => {
                let host = weights
                    .clone()
                    .into_entries()
                    .map(|(key, value)| {
                        let mut host = HostTensor::download(value)?;
                        if key.layout.is_some() {
                            host = host.into_verbatim();
                        }
                        host.pin(&self.device);
                        Ok((key, host))
                    })
                    .collect::<Result<HostWeights>>()?;
                *store = Store::Host(Arc::new(host));
            }
            (Store::Host(_), Home::Device) => {
                let fetched = store.fetch(&self.device);
                // until then the host's copy is the only one
                check_computed(fetched.clone().into_entries().map(|(_, value)| value))?;
                *store = Store::Device(fetched);
            }
            _ => {}
        }
        Ok(())
    }

    /// Moves all weights.
    ///
    /// # Errors
    /// `Error::Device` or `Error::OutOfMemory` where a copy fails; the weights of that unit stay where they were.
    pub fn move_to(&mut self, home: Home) -> Result<()> {
        (0..self.units.len()).try_for_each(|unit| self.move_unit(unit, home))
    }

    /// Bytes of the weights in `home`.
    pub fn bytes_in(&self, home: Home) -> usize {
        let there = self.units.iter().filter(|u| u.store.home() == home);
        there.map(|u| u.store.bytes()).sum()
    }
}
