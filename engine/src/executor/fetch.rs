//! Weights on their way to the device, ahead of their use.

use super::runtime::Runtime;
use crate::Result;
use crate::plan::Role;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::Pending;
use firebrick_models::Decoder;
use firebrick_models::decoder::{HostWeights, Store};
use firebrick_models::weights::Weights;
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
    /// In the device's queue, before the work that needs them.
    There(Weights, MemoryGuard),
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

    /// The weights of the next visit.
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
            match copy {
                // read now and not ahead: an update in the backward pass replaces what is on the device
                Transit::Resident => fetched.weights.push(decoder.weights(unit)),
                Transit::Copying(copy) => {
                    let (weights, hold) = self.upload(decoder, copy.wait()?);
                    fetched.weights.push(weights);
                    fetched.holds.push(hold);
                }
                Transit::There(weights, hold) => {
                    fetched.weights.push(weights);
                    fetched.holds.push(hold);
                }
            }
        }
        self.upload_ahead(decoder)?;
        Ok(fetched)
    }

    /// Copies that are ready for later visits go into the device's queue before the work of this one.
    fn upload_ahead(&mut self, decoder: &Decoder) -> Result<()> {
        let mut started = std::mem::take(&mut self.started);
        for (_, copies) in &mut started {
            for copy in copies {
                if let Transit::Copying(pending) = copy
                    && let Some(host) = pending.take_ready()
                {
                    let (weights, hold) = self.upload(decoder, host?);
                    *copy = Transit::There(weights, hold);
                }
            }
        }
        self.started = started;
        Ok(())
    }

    fn upload(&self, decoder: &Decoder, host: HostWeights) -> (Weights, MemoryGuard) {
        let bytes = host.iter().map(|(_, value)| value.bytes()).sum();
        let hold = self.accounts.hold(self.category, Home::Device, bytes);
        let device = decoder.device();
        let entries = host
            .into_iter()
            .map(|(slot, value)| (slot, value.into_device(device)));
        (Weights::new(entries.collect()), hold)
    }

    /// Starts the copy that the device will take over. The host keeps its own.
    fn start(&self, decoder: &Decoder, unit: usize) -> Transit {
        match &decoder.units()[unit].store {
            Store::Device(_) => Transit::Resident,
            Store::Host(host) => {
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
