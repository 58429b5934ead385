//! A decoder: a chain of units with their weights.

mod adapters;
mod block;
mod decode;
mod forward;
mod init;
mod prepack;
mod quantized;
mod rank_part;
mod stage;
mod tensor_shard;
mod trained_share;
mod unit_store;
mod value_head;

pub use block::Block;
pub use rank_part::{RankPart, ValueRange};
pub use unit_store::{HostWeights, NewParam, Param, Store, Unit};
pub(crate) use value_head::fresh_head;

use crate::Result;
use crate::adapter::LoraConfig;
use crate::arch::Arch;
use crate::tensor_group::TensorGroup;
use crate::unit::{ParamSpec, chain, unit_specs};
use crate::weights::{WeightKey, Weights};
use block::TrainedShare;
use burn::tensor::{Device, Tensor};
use firebrick_arch::PipelineStage;
use firebrick_backends::accounts::Home;
use firebrick_backends::kernels;
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::{HostTensor, check_computed};
use firebrick_backends::{Precision, PrecisionExt};
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
    /// Whether adapters run.
    adapters_on: bool,
    /// The ranks that share its matrices, where it is a [share](Self::tensor_shard).
    tensor: Option<TensorGroup>,
    /// Which share of which model it is, where it is one that is [trained](Self::trained_share).
    share: Option<Arc<TrainedShare>>,
    /// Which stage of a pipeline trains it, where one does.
    stage: Option<PipelineStage>,
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

    /// The same; `built` is told of every unit, by its index, before the next one is built.
    fn build_units<E, V: Into<NewParam>>(
        arch: Arch,
        device: &Device,
        mut value: impl FnMut(usize, &ParamSpec) -> Result<V, E>,
        mut built: impl FnMut(&mut Self, usize) -> Result<(), E>,
    ) -> Result<Self, E> {
        let dtype = arch.precision.dtype(device);
        let mut decoder = Self {
            arch,
            units: Vec::new(),
            device: device.clone(),
            lora: None,
            adapters_on: true,
            tensor: None,
            share: None,
            stage: None,
        };
        let mut next = 0;
        for (unit, kind) in chain(&decoder.arch).into_iter().enumerate() {
            let mut specs = unit_specs(&decoder.arch, kind);
            let range = next..next + specs.len();
            next = range.end;
            let entry = |(spec, index): (&mut ParamSpec, usize)| -> Result<(WeightKey, Tensor<2>), E> {
                let NewParam { layout, tensor } = value(index, spec)?.into();
                spec.trainable = layout.is_none();
                let slot = spec.slot;
                Ok(match layout {
                    Some(_) => (WeightKey { slot, layout }, tensor),
                    None => (slot.into(), stored_as(tensor, dtype)),
                })
            };
            let entries = specs.iter_mut().zip(range.clone()).map(entry);
            let entries = entries.collect::<Result<Vec<_>, E>>()?;
            decoder.units.push(Unit {
                kind,
                specs,
                store: Store::Device(Weights::new(entries)),
                range,
                sharded: false,
            });
            built(&mut decoder, unit)?;
        }
        Ok(decoder)
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
    #[must_use]
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// The device on which it runs.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The units in order.
    #[must_use]
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

    /// The parameter at a flat index. A value in host memory is copied, and a frozen matrix in few bits is widened to
    /// f32.
    #[must_use]
    pub fn param(&self, index: usize) -> Param {
        let unit = &self.units[self.units.partition_point(|u| u.range.end <= index)];
        let place = index - unit.range.start;
        if let Some(layout) = unit.store.layout(place) {
            return self.widened_param(&unit.store, place, layout, 0..layout.matrices);
        }
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

    /// Number of parameters that are trained.
    #[must_use]
    pub fn num_trainable(&self) -> usize {
        let trainable = self.specs().filter(|spec| spec.trainable);
        trainable.map(ParamSpec::numel).sum()
    }

    /// Flat index of the head's projection: the embedding's matrix where they are tied.
    #[must_use]
    pub fn projection_index(&self) -> usize {
        if self.arch.tied { 0 } else { self.units[self.units.len() - 1].range.start + 1 }
    }

    /// Replaces every parameter: `f(flat index, spec, value)` gives the new value, which stays where the old one was.
    /// Frozen matrices in few bits are left as they are.
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
            match &mut unit.store {
                Store::Device(weights) => {
                    let value = weights.take(i);
                    match f(index, spec, Param::Device(value))? {
                        Param::Device(new) => weights.put(i, new),
                        Param::Host(_) => {
                            unreachable!("a parameter stays on the device or on the host")
                        }
                    }
                }
                Store::Host(host) => {
                    let host = Arc::make_mut(host);
                    let empty = HostTensor::from_values(Vec::new(), [0, 0]);
                    let value = std::mem::replace(&mut host[i].1, empty);
                    match f(index, spec, Param::Host(value))? {
                        Param::Host(mut new) => {
                            new.pin(&self.device);
                            host[i].1 = new;
                        }
                        Param::Device(_) => {
                            unreachable!("a parameter stays on the device or on the host")
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Keeps some values of each parameter of a unit, copied, where the whole ones lie: those that `part` says of so
    /// many, counted in row-major order, as a matrix of the shape that it says. The unit cannot run until it is
    /// [whole](Self::unshard_unit) again; other weights may be passed to where it runs.
    ///
    /// # Errors
    /// Where memory runs out, or the device fails. The unit is then what it was.
    pub fn shard_unit(&mut self, unit: usize, part: impl Fn(usize) -> (Range<usize>, [usize; 2])) -> Result<()> {
        let own = &self.units[unit];
        let parts: Vec<Param> = own
            .specs
            .iter()
            .zip(own.range.clone())
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
    /// Where memory runs out, or the device fails. The unit is then what it was.
    pub fn unshard_unit(&mut self, unit: usize, values: Vec<Param>) -> Result<()> {
        let device = self.device.clone();
        let home = self.units[unit].store.home();
        let whole = values.into_iter().map(|value| match (home, value) {
            (Home::Device, value) => Ok(Param::Device(value.into_device(&device))),
            (Home::Host, Param::Device(value)) => Ok(Param::Host(HostTensor::download(value)?)),
            (Home::Host, own) => Ok(own),
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
    /// Where some are not, since memory ran out or the device failed.
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
    /// Where memory runs out, or the device fails. The weights are then what they were, and this may be run again.
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
                let own = kernels::duplicate(&weights.at(i));
                check_computed([own.clone()])?;
                weights.put(i, own);
            }
        }
        Ok(())
    }

    /// Moves the weights of a unit to `home` and frees the old copy, once the new one is there.
    ///
    /// # Errors
    /// Where memory runs out there, or the device fails. The weights are then where they were.
    pub fn move_unit(&mut self, unit: usize, home: Home) -> Result<()> {
        let store = &mut self.units[unit].store;
        match (&*store, home) {
            (Store::Device(weights), Home::Host) => {
                let host = weights
                    .clone()
                    .into_entries()
                    .map(|(key, value)| {
                        let mut host = HostTensor::download_pinned(value)?;
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
    #[must_use]
    pub fn bytes_in(&self, home: Home) -> usize {
        let there = self.units.iter().filter(|u| u.store.home() == home);
        there.map(|u| u.store.bytes()).sum()
    }
}
