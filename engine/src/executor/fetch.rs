//! Weights on their way to the device, ahead of their use.

use super::runtime::Runtime;
use super::weight_shards::WeightShards;
use crate::Result;
use crate::plan::{ModelPlan, Role};
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::{HostTensor, Pending, Upload};
use firebrick_models::Decoder;
use firebrick_models::decoder::{HostWeights, Store};
use firebrick_models::weights::{WeightKey, Weights};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// Weights of the units of one visit, on the device for as long as this value lives.
pub(super) struct Fetched {
    pub weights: Vec<Weights>,
    /// Given back with the weights.
    holds: Vec<Arc<MemoryGuard>>,
}

/// Gathered weights of a unit, and what they are accounted for.
type GatheredUnit = (Weights, Arc<MemoryGuard>);

/// One unit's weights on their way.
enum Transit {
    /// They live on the device.
    Resident,
    /// Ranks share them out, and gather them when the visit begins.
    Sharded,
    /// The host makes the copy that the device will take over.
    Copying(Pending<HostWeights>),
    /// On their way to the device.
    There(Vec<WeightKey>, Upload, MemoryGuard),
}

/// Walks the units in the order in which a pass will visit them, so that the copies of host weights start before the visit.
pub(super) struct Fetcher<'r> {
    runtime: &'r Runtime,
    accounts: Arc<Accounts>,
    category: Category,
    /// Visits whose copies have not started.
    ahead: VecDeque<Range<usize>>,
    /// Visits under way, in order.
    started: VecDeque<(Range<usize>, Vec<Transit>)>,
    prefetch: usize,
    /// The ranks that share weights out, where they do.
    shards: Option<WeightShards>,
    /// Gathered weights that stay for a later visit, where they do.
    kept: Option<BTreeMap<usize, GatheredUnit>>,
}

impl<'r> Fetcher<'r> {
    pub fn new(
        runtime: &'r Runtime,
        role: Role,
        visits: impl IntoIterator<Item = Range<usize>>,
        plan: &ModelPlan,
    ) -> Self {
        Self {
            shards: WeightShards::of(plan, &runtime.world().replicas()),
            kept: (!plan.reshard_after_forward).then(BTreeMap::new),
            runtime,
            accounts: runtime.accounts.for_model(role),
            category: role.category(),
            ahead: visits.into_iter().collect(),
            started: VecDeque::new(),
            prefetch: plan.prefetch,
        }
    }

    /// The whole weights of those units of a visit that ranks share out: kept since an earlier visit, or gathered.
    fn gathered(
        &mut self,
        decoder: &Decoder,
        units: &Range<usize>,
    ) -> Result<BTreeMap<usize, GatheredUnit>> {
        let (mut found, mut missing) = (BTreeMap::new(), Vec::new());
        for unit in units
            .clone()
            .filter(|&unit| decoder.units()[unit].is_sharded())
        {
            match self.kept.as_mut().and_then(|kept| kept.remove(&unit)) {
                Some(kept) => {
                    found.insert(unit, kept);
                }
                None => missing.push(unit),
            }
        }
        let Some(shards) = self.shards.as_ref().filter(|_| !missing.is_empty()) else {
            return Ok(found);
        };
        let started = self.started.iter().map(|(units, _)| units);
        let again = |unit| {
            started
                .clone()
                .chain(&self.ahead)
                .any(|u| u.contains(&unit))
        };
        for (unit, values) in
            missing
                .iter()
                .zip(shards.gather(decoder, &missing, &self.accounts)?)
        {
            let bytes = values.iter().map(HostTensor::bytes).sum();
            let hold = self.accounts.hold(self.category, Home::Device, bytes);
            let slots = decoder.units()[*unit].specs.iter();
            let slots = slots.map(|spec| WeightKey::from(spec.slot));
            let values = values.into_iter();
            let values = values.map(|value| value.into_device(decoder.device()));
            let weights = Weights::new(slots.zip(values).collect());
            let gathered = (weights, Arc::new(hold));
            if let Some(kept) = self.kept.as_mut().filter(|_| again(*unit)) {
                kept.insert(*unit, gathered.clone());
            }
            found.insert(*unit, gathered);
        }
        Ok(found)
    }

    /// The weights of the next visit. Those of the visit after, whose copies were begun at the last call, run beside the kernels that
    /// were asked for since.
    pub fn next(&mut self, decoder: &Decoder) -> Result<Fetched> {
        while self.started.len() <= self.prefetch {
            let Some(visit) = self.ahead.pop_front() else {
                break;
            };
            let copies = visit.clone().map(|unit| self.start(decoder, unit));
            let copies = copies.collect();
            self.started.push_back((visit, copies));
        }
        let Some((units, copies)) = self.started.pop_front() else {
            unreachable!("a visit that was not announced")
        };
        let mut gathered = self.gathered(decoder, &units)?;
        let mut fetched = Fetched {
            weights: Vec::with_capacity(units.len()),
            holds: Vec::new(),
        };
        for (unit, copy) in units.zip(copies) {
            let (keys, upload, hold) = match copy {
                // read now and not ahead: an update in the backward pass replaces what is on the device
                Transit::Resident => {
                    fetched.weights.push(decoder.weights(unit));
                    continue;
                }
                Transit::Sharded => {
                    let Some((weights, hold)) = gathered.remove(&unit) else {
                        unreachable!("weights are shared out where the plan says so")
                    };
                    fetched.weights.push(weights);
                    fetched.holds.push(hold);
                    continue;
                }
                Transit::Copying(copy) => self.upload(decoder, copy.wait()?),
                Transit::There(keys, upload, hold) => (keys, upload, hold),
            };
            let entries = keys.into_iter().zip(upload.finish());
            fetched.weights.push(Weights::new(entries.collect()));
            fetched.holds.push(Arc::new(hold));
        }
        self.upload_ahead(decoder)?;
        Ok(fetched)
    }

    /// Copies for later visits: those that were begun are asked for, those that are ready are begun, before the work of this visit.
    fn upload_ahead(&mut self, decoder: &Decoder) -> Result<()> {
        let mut started = std::mem::take(&mut self.started);
        for copy in started.iter_mut().flat_map(|(_, copies)| copies) {
            if let Transit::There(_, upload, _) = copy {
                upload.start();
            }
        }
        for copy in started.iter_mut().flat_map(|(_, copies)| copies) {
            if let Transit::Copying(pending) = copy
                && let Some(host) = pending.take_ready()
            {
                let (keys, upload, hold) = self.upload(decoder, host?);
                *copy = Transit::There(keys, upload, hold);
            }
        }
        self.started = started;
        Ok(())
    }

    fn upload(
        &self,
        decoder: &Decoder,
        host: HostWeights,
    ) -> (Vec<WeightKey>, Upload, MemoryGuard) {
        let bytes = host.iter().map(|(_, value)| value.bytes()).sum();
        let hold = self.accounts.hold(self.category, Home::Device, bytes);
        let (keys, values) = host.into_iter().unzip();
        let upload = self.runtime.copier.upload(values, decoder.device());
        (keys, upload, hold)
    }

    /// Starts the copy that the device will take over. The host keeps its own.
    fn start(&self, decoder: &Decoder, unit: usize) -> Transit {
        if decoder.units()[unit].is_sharded() {
            return Transit::Sharded;
        }
        match &decoder.units()[unit].store {
            Store::Device(_) => Transit::Resident,
            Store::Host(host) => {
                if host.iter().all(|(_, value)| value.is_shared()) {
                    return Transit::Copying(Pending::Done(Ok(HostWeights::clone(host))));
                }
                let host = Arc::clone(host);
                let copy = self
                    .runtime
                    .copier
                    .run(move || Ok(HostWeights::clone(&host)));
                Transit::Copying(copy)
            }
        }
    }
}
