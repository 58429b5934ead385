//! Weights that ranks share out between passes (`ZeRO`'s third stage, arXiv:1910.02054; FSDP, arXiv:2304.11277): each
//! has its shard of every parameter, and all gather a unit's before it runs.

use super::shards::{Gathered, Shards, Started, from_device_to_device, own_part};
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

/// The ranks that share out a model's weights.
#[derive(Clone, Debug)]
pub(super) struct WeightShards {
    world: World,
    partition: Partition,
}

impl WeightShards {
    /// Those of a plan, where it shares weights out and there are several ranks.
    pub fn of(plan: &ModelPlan, world: &World) -> Option<Self> {
        Self::partition_of(plan, world).map(|partition| Self { world: world.clone(), partition })
    }

    /// What each has under a plan that shares weights out.
    pub fn partition_of(plan: &ModelPlan, world: &World) -> Option<Partition> {
        let partition = world.partition(plan.zero);
        (plan.zero == Zero::Stage3 && !partition.is_whole()).then_some(partition)
    }

    /// The ranks.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// What each has.
    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// Whether ranks share out the parameter at a flat index.
    pub fn has(decoder: &Decoder, index: usize) -> bool {
        let mut shared = decoder.units()[Self::units(decoder)].iter();
        shared.any(|unit| unit.range.contains(&index))
    }

    /// The units that are shared out: tied ends, which both use one matrix, are whole on every rank.
    fn units(decoder: &Decoder) -> Range<usize> {
        if decoder.arch().tied { decoder.body() } else { 0..decoder.units().len() }
    }

    /// Keeps this rank's shards of all units that are whole. Says whether there were any.
    pub fn share_out(&self, decoder: &mut Decoder) -> Result<bool> {
        let mut shared = false;
        for unit in Self::units(decoder) {
            if !decoder.units()[unit].is_sharded() {
                let part = |numel: usize| {
                    let own = self.partition.range(numel);
                    let shape = Partition::shape(own.len());
                    (own, shape)
                };
                decoder.shard_unit(unit, part)?;
                shared = true;
            }
        }
        Ok(shared)
    }

    /// Makes all units whole, on all ranks: those that any rank lacks are gathered. Says whether there were any.
    pub fn make_whole(&self, decoder: &mut Decoder, accounts: &Arc<Accounts>) -> Result<bool> {
        let lacks = |unit: usize| u8::from(decoder.units()[unit].is_sharded());
        let own: Vec<u8> = Self::units(decoder).map(lacks).collect();
        // after an attempt that failed on one rank, units may be whole on others
        let all = self.world.exchange(own)?;
        let mut gathered = false;
        for (place, unit) in Self::units(decoder).enumerate() {
            if all.iter().all(|rank| rank.get(place) == Some(&0)) {
                continue;
            }
            // where one has it whole, it may be on the host
            let shared = all.iter().all(|rank| rank.get(place) == Some(&1));
            let values: Vec<Param> = if shared && self.gathers_on_device(decoder, &[unit]) {
                let whole = self.gather_on_device(decoder, &[unit], accounts)?;
                whole.into_iter().flatten().map(Param::Device).collect()
            } else {
                let whole = self.gather(decoder, &[unit], accounts)?;
                whole.into_iter().flatten().map(Param::Host).collect()
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
            .gather(&self.world, accounts, |index| Ok(own_part(decoder, index, self.partition).download()?))?;
        Ok(whole(decoder, units, &gathered))
    }

    /// Whether shards of these units go from device to device, without a copy to the host: where the ranks exchange
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
        let own = |index| Ok(own_part(decoder, index, self.partition));
        let layout = self.layout(decoder, units);
        let whole = layout.gather_on_device(&self.world, accounts, values, own)?;
        let mut whole = whole.into_iter();
        let count = |unit: &usize| decoder.units()[*unit].range.len();
        let units = units.iter().map(count);
        Ok(units.map(|n| whole.by_ref().take(n).collect()).collect())
    }

    /// The same without waiting: the gather is under way while this rank computes. All ranks start it at the same place
    /// of their order.
    pub fn start(&self, decoder: &Decoder, units: Vec<usize>, accounts: &Arc<Accounts>) -> Result<StartedUnits> {
        let started = self
            .layout(decoder, &units)
            .start(&self.world, accounts, |index| Ok(own_part(decoder, index, self.partition).download()?))?;
        Ok(StartedUnits { units, started })
    }

    /// How some units lie in a message.
    fn layout(&self, decoder: &Decoder, units: &[usize]) -> Shards {
        let ranges = units.iter().map(|&unit| decoder.units()[unit].range.clone());
        let indices: Vec<usize> = ranges.flatten().collect();
        Shards::of(decoder, &indices, self.partition)
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
    let units = units.iter();
    units.map(|&unit| whole.by_ref().take(count(unit)).collect()).collect()
}
