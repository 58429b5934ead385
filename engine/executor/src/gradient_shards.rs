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
pub(super) struct Reduced {
    partition: Partition,
    /// Whether a unit's gradients are summed whenever a pass has completed them; if not, once for the whole step.
    each_pass: bool,
    shards: Vec<Option<(Gradient, MemoryGuard)>>,
    /// Parameters that any rank had a gradient of: the same on all.
    contributed: Vec<bool>,
}

impl Reduced {
    /// Empty shards of so many parameters, where a stage shares gradients or what is updated with them out over several
    /// ranks.
    pub fn planned(params: usize, zero: Zero, world: &World) -> Option<Self> {
        let partition = world.partition(zero);
        (!partition.is_whole()).then(|| Self {
            partition,
            each_pass: zero >= Zero::Stage2,
            shards: (0..params).map(|_| None).collect(),
            contributed: vec![false; params],
        })
    }

    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// Notes that a rank had a gradient of a parameter.
    pub fn note(&mut self, index: usize) {
        self.contributed[index] = true;
    }

    pub fn each_pass(&self) -> bool {
        self.each_pass
    }

    pub fn contributed(&self, index: usize) -> bool {
        self.contributed[index]
    }

    pub fn take(&mut self, index: usize) -> Option<Gradient> {
        self.shards[index].take().map(|(shard, _)| shard)
    }

    /// The shards of some parameters, by flat index.
    pub fn shards(&self, params: Range<usize>) -> impl Iterator<Item = (usize, &Gradient)> {
        let all = params.clone().zip(&self.shards[params]);
        all.filter_map(|(index, shard)| Some((index, &shard.as_ref()?.0)))
    }

    /// Adds a shard to what is there, where this plan keeps gradients.
    ///
    /// # Errors
    /// Where a copy fails.
    pub fn add(&mut self, index: usize, own: Gradient, home: Home, (accounts, device): Place<'_>) -> Result<()> {
        self.shards[index] = Some(match self.shards[index].take() {
            Some((Gradient::Host(mut sum), hold)) => {
                sum.add(own.into_host()?);
                (Gradient::Host(sum), hold)
            }
            Some((Gradient::Device(sum), hold)) => (Gradient::Device(sum + own.into_device(device)), hold),
            None => {
                let hold = accounts.hold(Category::Gradients, home, own.bytes());
                let shard = match home {
                    Home::Host => Gradient::Host(own.into_host()?),
                    Home::Device => Gradient::Device(own.into_device(device)),
                };
                (shard, hold)
            }
        });
        Ok(())
    }
}

type Place<'a> = (&'a Arc<Accounts>, &'a Device);
