//! Weights that ranks shard between passes (`ZeRO`'s third stage, arXiv:1910.02054; FSDP, arXiv:2304.11277): each has
//! its shard of every parameter, and all gather a unit's before it runs.

use super::shards::{Gathered, Shards, Started, from_device_to_device, local_part};
use burn::tensor::Tensor;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_models::decoder::Param;
use firebrick_plan::{ModelPlan, Partition, Zero};
use std::ops::Range;
use std::sync::Arc;

/// The ranks that shard a model's weights.
#[derive(Clone, Debug)]
pub(super) struct WeightShards {
    pub world: World,
    pub partition: Partition,
}

impl WeightShards {
    /// Those of a plan, where it shards weights and there are several ranks.
    pub fn new(plan: &ModelPlan, world: &World) -> Option<Self> {
        Self::partition_of(plan, world).map(|partition| Self { world: world.clone(), partition })
    }

    /// The partition of a plan that shards weights.
    pub fn partition_of(plan: &ModelPlan, world: &World) -> Option<Partition> {
        let partition = world.partition(plan.zero);
        (plan.zero == Zero::Stage3 && !partition.is_whole()).then_some(partition)
    }

    /// True if ranks shard the parameter at a flat index.
    pub fn has(decoder: &Decoder, index: usize) -> bool {
        let mut shared = decoder.units()[Self::units(decoder)].iter();
        shared.any(|unit| unit.range.contains(&index))
    }

    /// The units that are sharded: tied ends, which both use one matrix, are whole on every rank.
    fn units(decoder: &Decoder) -> Range<usize> {
        if decoder.arch().tied { decoder.body() } else { 0..decoder.units().len() }
    }

    /// Keeps this rank's shards of all units that are whole. Returns true if there were any.
    pub fn shard(&self, decoder: &mut Decoder) -> Result<bool> {
        let mut shared = false;
        for unit in Self::units(decoder) {
            if !decoder.units()[unit].is_sharded() {
                let part = |numel: usize| {
                    let range = self.partition.range(numel);
                    let shape = Partition::shape(range.len());
                    (range, shape)
                };
                decoder.shard_unit(unit, part)?;
                shared = true;
            }
        }
        Ok(shared)
    }

    /// Makes all units whole, on all ranks: those that any rank lacks are gathered. Returns true if there were any.
    pub fn make_whole(&self, decoder: &mut Decoder, accounts: &Arc<Accounts>) -> Result<bool> {
        let lacks = |unit: usize| u8::from(decoder.units()[unit].is_sharded());
        let sharded: Vec<u8> = Self::units(decoder).map(lacks).collect();
        // after an attempt that failed on one rank, units may be whole on others
        let sharded = self.world.exchange(sharded)?;
        let mut gathered = false;
        for (place, unit) in Self::units(decoder).enumerate() {
            if sharded.iter().all(|rank| rank.get(place) == Some(&0)) {
                continue;
            }
            // where one has it whole, it may be on the host
            let shared = sharded.iter().all(|rank| rank.get(place) == Some(&1));
            let values: Vec<Param> = if shared && self.gathers_on_device(decoder, &[unit]) {
                self.gather_on_device(decoder, &[unit], accounts)?.into_iter().flatten().map(Param::Device).collect()
            } else {
                self.gather(decoder, &[unit], accounts)?.into_iter().flatten().map(Param::Host).collect()
            };
            if decoder.units()[unit].is_sharded() {
                decoder.unshard_unit(unit, values)?;
            }
            gathered = true;
        }
        Ok(gathered)
    }

    /// The whole parameters of some units, in their order, on the host: in one message, which all ranks send at the
    /// same time.
    pub fn gather(&self, decoder: &Decoder, units: &[usize], accounts: &Arc<Accounts>) -> Result<Vec<Vec<HostTensor>>> {
        let gathered = self
            .layout(decoder, units)
            .gather(&self.world, accounts, |index| Ok(local_part(decoder, index, self.partition).download()?))?;
        Ok(whole(decoder, units, &gathered))
    }

    /// True if shards of these units go from device to device, without a copy to the host: where the ranks exchange
    /// values from there and the plan keeps the shards there. The same on every rank.
    pub fn gathers_on_device(&self, decoder: &Decoder, units: &[usize]) -> bool {
        units.iter().all(|&unit| from_device_to_device(&self.world, decoder, unit))
    }

    /// The whole parameters of some units, in their order, on the device: as [`gather`](Self::gather).
    pub fn gather_on_device(
        &self,
        decoder: &Decoder,
        units: &[usize],
        accounts: &Arc<Accounts>,
    ) -> Result<Vec<Vec<Tensor<2>>>> {
        let device = decoder.device();
        let values = (device, decoder.arch().precision.dtype(device));
        let shard = |index| Ok(local_part(decoder, index, self.partition));
        let whole = self.layout(decoder, units).gather_on_device(&self.world, accounts, values, shard)?;
        let mut whole = whole.into_iter();
        let count = |unit: &usize| decoder.units()[*unit].range.len();
        Ok(units.iter().map(count).map(|n| whole.by_ref().take(n).collect()).collect())
    }

    /// Starts a gather without waiting: it runs while this rank computes. All ranks start it at the same place of their
    /// order.
    pub fn start(&self, decoder: &Decoder, units: Vec<usize>, accounts: &Arc<Accounts>) -> Result<StartedUnits> {
        let started = self
            .layout(decoder, &units)
            .start(&self.world, accounts, |index| Ok(local_part(decoder, index, self.partition).download()?))?;
        Ok(StartedUnits { units, started })
    }

    /// Layout of some units in a message.
    fn layout(&self, decoder: &Decoder, units: &[usize]) -> Shards {
        let indices: Vec<usize> = units.iter().flat_map(|&unit| decoder.units()[unit].range.clone()).collect();
        Shards::new(decoder, &indices, self.partition)
    }
}

/// Units that are being gathered.
pub(super) struct StartedUnits {
    /// Which.
    pub units: Vec<usize>,
    started: Started,
}

impl StartedUnits {
    /// Their whole parameters, in their order, on the host.
    pub fn wait(self, decoder: &Decoder) -> Result<Vec<(usize, Vec<HostTensor>)>> {
        let gathered = self.started.wait()?;
        let whole = whole(decoder, &self.units, &gathered);
        Ok(self.units.into_iter().zip(whole).collect())
    }
}

fn whole(decoder: &Decoder, units: &[usize], gathered: &Gathered) -> Vec<Vec<HostTensor>> {
    let count = |unit: usize| decoder.units()[unit].range.len();
    let params = units.iter().map(|&unit| count(unit)).sum();
    let mut whole = (0..params).map(|place| gathered.whole(place, decoder));
    units.iter().map(|&unit| whole.by_ref().take(count(unit)).collect()).collect()
}
