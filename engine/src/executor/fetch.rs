//! Weights on their way to the device, ahead of their use.

use super::runtime::Runtime;
use crate::Result;
use crate::plan::Role;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::{Pending, Upload};
use firebrick_models::Decoder;
use firebrick_models::decoder::{HostWeights, Store};
use firebrick_models::weights::{WeightKey, Weights};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Weights of the units of one visit, on the device for as long as this value lives.
pub(super) struct Fetched {
    pub weights: Vec<Weights>,
    /// Given back with the weights.
    holds: Vec<MemoryGuard>,
}

/// One unit's weights on their way.
enum Transit {
    /// They live on the device.
    Resident,
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
}

impl<'r> Fetcher<'r> {
    pub fn new(
        runtime: &'r Runtime,
        role: Role,
        visits: impl IntoIterator<Item = Range<usize>>,
        prefetch: usize,
    ) -> Self {
        Self {
            runtime,
            accounts: runtime.accounts.for_model(role),
            category: role.category(),
            ahead: visits.into_iter().collect(),
            started: VecDeque::new(),
            prefetch,
        }
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
                Transit::Copying(copy) => self.upload(decoder, copy.wait()?),
                Transit::There(keys, upload, hold) => (keys, upload, hold),
            };
            let entries = keys.into_iter().zip(upload.finish());
            fetched.weights.push(Weights::new(entries.collect()));
            fetched.holds.push(hold);
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
