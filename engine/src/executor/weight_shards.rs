//! Weights that ranks share out between passes (`ZeRO`'s third stage, arXiv:1910.02054; FSDP, arXiv:2304.11277): each has its shard of
//! every parameter, and all gather a unit's before it runs.

use super::shards::{Shards, own_part};
use crate::Result;
use crate::plan::{ModelPlan, Partition, Zero};
use crate::world::World;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::transfer::HostTensor;
use firebrick_models::Decoder;
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
        let partition = world.partition(plan.zero);
        (plan.zero == Zero::Stage3 && !partition.is_whole()).then(|| Self {
            world: world.clone(),
            partition,
        })
    }

    /// The units that are shared out: tied ends, which both use one matrix, are whole on every rank.
    fn units(decoder: &Decoder) -> Range<usize> {
        if decoder.arch().tied {
            decoder.body()
        } else {
            0..decoder.units().len()
        }
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
            for values in self.gather(decoder, &[unit], accounts)? {
                if decoder.units()[unit].is_sharded() {
                    decoder.unshard_unit(unit, values)?;
                }
            }
            gathered = true;
        }
        Ok(gathered)
    }

    /// The whole parameters of some units, in their order, on the host: in one message, which all ranks send at the same time.
    pub fn gather(
        &self,
        decoder: &Decoder,
        units: &[usize],
        accounts: &Arc<Accounts>,
    ) -> Result<Vec<Vec<HostTensor>>> {
        let ranges = units
            .iter()
            .map(|&unit| decoder.units()[unit].range.clone());
        let indices: Vec<usize> = ranges.flatten().collect();
        let shards = Shards::of(decoder, &indices, self.partition);
        let gathered = shards.gather(&self.world, accounts, |index| {
            Ok(own_part(decoder, index, self.partition).download()?)
        })?;
        let mut whole = (0..indices.len()).map(|place| gathered.whole(place, decoder));
        let units = units.iter().map(|&unit| {
            let count = decoder.units()[unit].range.len();
            whole.by_ref().take(count).collect()
        });
        Ok(units.collect())
    }
}
