//! Weights on their way to the device, ahead of their use.

use super::runtime::Runtime;
use super::weight_shards::{StartedUnits, WeightShards};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::{HostTensor, Pending, Upload};
use firebrick_core::Result;
use firebrick_models::Decoder;
use firebrick_models::decoder::{HostWeights, Param, Store};
use firebrick_models::weights::{WeightKey, Weights};
use firebrick_plan::{ModelPlan, Role};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
    /// Ranks shard them, and gather them for this visit or have kept them since an earlier one.
    Sharded,
    /// The host makes the copy that the device will take over.
    Copying(Pending<HostWeights>),
    /// On their way to the device.
    There(Vec<WeightKey>, Upload, MemoryGuard),
}

/// A visit that is ahead of the work.
struct Visit {
    units: Range<usize>,
    transits: Vec<Transit>,
    gathering: Option<Gathering>,
    /// Those of them that it leaves for a later visit.
    leaves: Vec<usize>,
}

/// Units that a visit gathers.
enum Gathering {
    /// When it begins.
    Then(Vec<usize>),
    /// Already.
    UnderWay(StartedUnits),
}

/// Gathered values on the host.
fn on_host(units: Vec<(usize, Vec<HostTensor>)>) -> Vec<(usize, Vec<Param>)> {
    let of = |values: Vec<HostTensor>| values.into_iter().map(Param::Host).collect();
    units.into_iter().map(|(unit, values)| (unit, of(values))).collect()
}

/// Walks the units in the order in which a pass will visit them, so that copies of host weights and gathers of shards
/// start before the visit. When they start follows from the plan alone, the same on every rank.
pub(super) struct Fetcher<'r> {
    runtime: &'r Runtime,
    accounts: Arc<Accounts>,
    category: Category,
    /// Visits that have not started.
    ahead: VecDeque<Range<usize>>,
    /// Visits under way, in order.
    started: VecDeque<Visit>,
    prefetch: usize,
    /// The ranks that shard weights, where they do.
    shards: Option<WeightShards>,
    /// Gathered weights that stay for a later visit, without `reshard_after_forward`.
    kept: Option<BTreeMap<usize, GatheredUnit>>,
    /// Units that a visit which has started leaves for a later one.
    promised: BTreeSet<usize>,
}

impl<'r> Fetcher<'r> {
    pub fn new(
        runtime: &'r Runtime,
        role: Role,
        visits: impl IntoIterator<Item = Range<usize>>,
        plan: &ModelPlan,
    ) -> Self {
        Self {
            shards: WeightShards::new(plan, &runtime.world().replicas()),
            kept: (!plan.reshard_after_forward).then(BTreeMap::new),
            promised: BTreeSet::new(),
            runtime,
            accounts: runtime.accounts.for_model(role),
            category: role.category(),
            ahead: visits.into_iter().collect(),
            started: VecDeque::new(),
            prefetch: plan.prefetch,
        }
    }

    /// Begins what a visit needs: copies of weights on the host, and a gather of those that ranks shard and that no
    /// visit before it has left.
    fn begin(&mut self, decoder: &Decoder, units: Range<usize>) -> Result<Visit> {
        let transits = units.clone().map(|unit| self.start(decoder, unit)).collect();
        let sharded = units.clone().filter(|&u| decoder.units()[u].is_sharded());
        let missing: Vec<usize> = sharded.filter(|unit| !self.promised.remove(unit)).collect();
        let mut leaves = Vec::new();
        if self.kept.is_some() {
            let later = |unit: &usize| self.ahead.iter().any(|visit| visit.contains(unit));
            leaves.extend(missing.iter().copied().filter(later));
            self.promised.extend(&leaves);
        }
        let gathering = match &self.shards {
            Some(_) if missing.is_empty() => None,
            Some(_) if self.prefetch == 0 => Some(Gathering::Then(missing)),
            // a gather from device to device is waited for
            Some(shards) if shards.gathers_on_device(decoder, &missing) => Some(Gathering::Then(missing)),
            Some(shards) => {
                let started = shards.start(decoder, missing, &self.accounts)?;
                Some(Gathering::UnderWay(started))
            }
            None => None,
        };
        Ok(Visit { units, transits, gathering, leaves })
    }

    /// The whole weights of those units of a visit that ranks shard: kept since an earlier visit, or gathered.
    fn gathered(&mut self, decoder: &Decoder, visit: &mut Visit) -> Result<BTreeMap<usize, GatheredUnit>> {
        let mut fetched = BTreeMap::new();
        if let Some(kept) = &mut self.kept {
            let units = visit.units.clone();
            fetched.extend(units.filter_map(|unit| Some((unit, kept.remove(&unit)?))));
        }
        let fresh: Vec<(usize, Vec<Param>)> = match (visit.gathering.take(), &self.shards) {
            (Some(Gathering::UnderWay(started)), _) => on_host(started.wait(decoder)?),
            (Some(Gathering::Then(units)), Some(shards)) => {
                if shards.gathers_on_device(decoder, &units) {
                    let whole = shards.gather_on_device(decoder, &units, &self.accounts)?.into_iter();
                    let whole = whole.map(|tensors| tensors.into_iter().map(Param::Device).collect());
                    units.into_iter().zip(whole).collect()
                } else {
                    let whole = shards.gather(decoder, &units, &self.accounts)?;
                    on_host(units.into_iter().zip(whole).collect())
                }
            }
            (Some(Gathering::Then(_)), None) | (None, _) => Vec::new(),
        };
        let width = decoder.arch().precision.dtype(decoder.device()).size();
        for (unit, values) in fresh {
            let specs = &decoder.units()[unit].specs;
            let bytes = specs.iter().map(|spec| spec.numel() * width).sum();
            let hold = self.accounts.hold(self.category, Home::Device, bytes);
            let slots = specs.iter().map(|spec| WeightKey::from(spec.slot));
            let values = values.into_iter().map(|value| value.into_device(decoder.device()));
            let weights = Weights::new(slots.zip(values).collect());
            let gathered = (weights, Arc::new(hold));
            if let Some(kept) = self.kept.as_mut().filter(|_| visit.leaves.contains(&unit)) {
                kept.insert(unit, gathered.clone());
            }
            fetched.insert(unit, gathered);
        }
        Ok(fetched)
    }

    /// The weights of the next visit. Those of the visits after, whose copies and gathers were begun at the last calls,
    /// come beside the kernels that were asked for since.
    pub fn next(&mut self, decoder: &Decoder) -> Result<Fetched> {
        while self.started.len() <= self.prefetch {
            let Some(visit) = self.ahead.pop_front() else {
                break;
            };
            let visit = self.begin(decoder, visit)?;
            self.started.push_back(visit);
        }
        let Some(mut visit) = self.started.pop_front() else { unreachable!("a visit that was not announced") };
        let mut gathered = self.gathered(decoder, &mut visit)?;
        let mut fetched = Fetched { weights: Vec::with_capacity(visit.units.len()), holds: Vec::new() };
        for (unit, copy) in visit.units.zip(visit.transits) {
            let (keys, upload, hold) = match copy {
                // read now and not ahead: an update in the backward pass replaces what is on the device
                Transit::Resident => {
                    fetched.weights.push(decoder.weights(unit));
                    continue;
                }
                Transit::Sharded => {
                    let Some((weights, hold)) = gathered.remove(&unit) else {
                        unreachable!("weights are sharded if the plan shards them")
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

    /// Copies for later visits: those that were begun are asked for, those that are ready are begun, before the work of
    /// this visit.
    fn upload_ahead(&mut self, decoder: &Decoder) -> Result<()> {
        let mut started = std::mem::take(&mut self.started);
        for copy in started.iter_mut().flat_map(|visit| &mut visit.transits) {
            if let Transit::There(_, upload, _) = copy {
                upload.start();
            }
        }
        for copy in started.iter_mut().flat_map(|visit| &mut visit.transits) {
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

    fn upload(&self, decoder: &Decoder, host: HostWeights) -> (Vec<WeightKey>, Upload, MemoryGuard) {
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
                let copy = self.runtime.copier.run(move || Ok(HostWeights::clone(&host)));
                Transit::Copying(copy)
            }
        }
    }
}
