//! Shards of gradients that were summed over ranks.

use super::gradient::Gradient;
use burn::tensor::Device;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_plan::{Partition, Zero};
use std::ops::Range;
use std::sync::Arc;

/// This rank's shards of gradients that all ranks have added to.
#[derive(Debug)]
pub(super) struct GradientShards {
    pub partition: Partition,
    /// True if a unit's gradients are summed whenever a pass has completed them; if not, once for the whole step.
    pub each_pass: bool,
    shards: Vec<Option<(Gradient, MemoryGuard)>>,
    /// Parameters that any rank had a gradient of: the same on all.
    pub contributed: Vec<bool>,
}

impl GradientShards {
    /// Empty shards of `params` parameters, if a `ZeRO` stage shards gradients or their update over several ranks.
    pub fn planned(params: usize, zero: Zero, world: &World) -> Option<Self> {
        let partition = world.partition(zero);
        (!partition.is_whole()).then(|| Self {
            partition,
            each_pass: zero >= Zero::Stage2,
            shards: (0..params).map(|_| None).collect(),
            contributed: vec![false; params],
        })
    }

    pub fn take(&mut self, index: usize) -> Option<Gradient> {
        self.shards[index].take().map(|(shard, _)| shard)
    }

    /// The shards of some parameters, by flat index.
    pub fn shards(&self, params: Range<usize>) -> impl Iterator<Item = (usize, &Gradient)> {
        params.clone().zip(&self.shards[params]).filter_map(|(index, shard)| Some((index, &shard.as_ref()?.0)))
    }

    /// Adds a shard to what is there, where this plan keeps gradients.
    ///
    /// # Errors
    /// If a copy fails.
    pub fn add(&mut self, index: usize, shard: Gradient, home: Home, (accounts, device): Place<'_>) -> Result<()> {
        self.shards[index] = Some(match self.shards[index].take() {
            Some((Gradient::Host(mut sum), hold)) => {
                sum.add(shard.into_host()?);
                (Gradient::Host(sum), hold)
            }
            Some((Gradient::Device(sum), hold)) => (Gradient::Device(sum + shard.into_device(device)), hold),
            None => {
                let hold = accounts.hold(Category::Gradients, home, shard.bytes());
                let shard = match home {
                    Home::Host => Gradient::Host(shard.into_host()?),
                    Home::Device => Gradient::Device(shard.into_device(device)),
                };
                (shard, hold)
            }
        });
        Ok(())
    }
}

type Place<'a> = (&'a Arc<Accounts>, &'a Device);
