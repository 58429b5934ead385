//! Environment of an executor: the copier, the accounts, readings of memory, and the limit that stands for a smaller
//! device.

use super::boundary_log::{Boundary, BoundaryLog};
use burn::tensor::{Device, Tensor};
use firebrick_backends::accounts::Accounts;
use firebrick_backends::allocator;
use firebrick_backends::heartbeat::beat;
use firebrick_backends::kernels::with_cublaslt;
use firebrick_backends::memory::{Reading, ReadingSource, counted_heap, read, read_pools};
use firebrick_backends::out_of_memory::OutOfMemory as Refused;
use firebrick_backends::transfer::Copier;
use firebrick_core::error::OutOfMemory;
use firebrick_core::world::World;
use firebrick_core::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Shared by everything that works for one run.
#[derive(Debug)]
pub struct Runtime {
    /// Who holds how much.
    pub accounts: Arc<Accounts>,
    /// Copies between host and device.
    pub copier: Arc<Copier>,
    device: Device,
    limit: Option<u64>,
    on_host: bool,
    measure: bool,
    deterministic: bool,
    cublaslt: Option<usize>,
    log: Option<Arc<BoundaryLog>>,
    world: World,
    /// Most that a reading of the pools found.
    most: Arc<AtomicU64>,
}

impl Runtime {
    /// Copies in place, no limit.
    pub fn new(device: &Device) -> Self {
        Self {
            accounts: Accounts::new(),
            copier: Arc::new(Copier::synchronous()),
            device: device.clone(),
            limit: None,
            on_host: read(device).source == ReadingSource::CountedHeap,
            measure: false,
            deterministic: true,
            cublaslt: None,
            log: None,
            world: World::default(),
            most: Arc::default(),
        }
    }

    /// Replaces the accounts by shared ones.
    #[must_use]
    pub fn with_accounts(mut self, accounts: Arc<Accounts>) -> Self {
        self.accounts = accounts;
        self
    }

    /// Takes a row of a log at every boundary, with a reading of the device's memory. The log is one of the same
    /// accounts.
    #[must_use]
    pub fn with_log(mut self, log: Arc<BoundaryLog>) -> Self {
        self.log = Some(log);
        self
    }

    /// Sets the ranks of the run.
    #[must_use]
    pub fn with_world(mut self, world: World) -> Self {
        self.world = world;
        self
    }

    /// The runtime of the critic, which may have other sequence-parallel groups: one copier, and one set of accounts.
    #[must_use]
    pub fn for_critic(&self) -> Self {
        Self {
            accounts: Arc::clone(&self.accounts),
            copier: Arc::clone(&self.copier),
            device: self.device.clone(),
            log: self.log.clone(),
            world: self.world.for_critic(),
            most: Arc::clone(&self.most),
            ..*self
        }
    }

    /// The ranks that share the work.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// The log of boundaries, if there is one.
    pub fn log(&self) -> Option<&Arc<BoundaryLog>> {
        self.log.as_ref()
    }

    /// Copies on a thread of their own, where `prefetch` copies may be in flight.
    #[must_use]
    pub fn with_prefetch(mut self, prefetch: usize) -> Self {
        self.copier = Arc::new(if prefetch > 0 { Copier::asynchronous(&self.device) } else { Copier::synchronous() });
        self
    }

    /// Treats device bytes above `limit` as out of memory: the counters are read at every segment boundary.
    #[must_use]
    pub fn with_limit(mut self, limit: Option<u64>) -> Self {
        self.limit = limit;
        self
    }

    /// Reads the device's pools at every boundary too, which waits for the device: for measurements of live graphs.
    #[must_use]
    pub fn measuring(mut self) -> Self {
        self.measure = true;
        self
    }

    /// True if the same numbers come out of the same numbers, to the bit: on by default. Off, GPUs may add with
    /// atomics.
    #[must_use]
    pub fn with_determinism(mut self, on: bool) -> Self {
        self.deterministic = on;
        self
    }

    /// True if nothing may be added in an order that threads decide.
    pub fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// Gives products of at least so many operations to cuBLASLt ([`with_cublaslt`]).
    #[must_use]
    pub fn with_cublaslt(mut self, least_operations: Option<usize>) -> Self {
        self.cublaslt = least_operations;
        self
    }

    /// Runs passes of a model, with matmuls as set.
    pub fn pass<R>(&self, work: impl FnOnce() -> R) -> R {
        with_cublaslt(self.cublaslt, work)
    }

    /// The device that computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes in use now, where reading them is cheap (the counted heap) or asked for.
    pub fn in_use(&self) -> Option<u64> {
        if self.on_host {
            allocator::heap().map(|heap| heap.current_bytes)
        } else if self.measure {
            let bytes = read(&self.device).in_use_bytes;
            self.most.fetch_max(bytes, Relaxed);
            Some(bytes)
        } else {
            None
        }
    }

    /// Lets go of graphs that nobody will differentiate. Burn keeps the nodes of a graph whose tensors are gone until
    /// some later backward pass sweeps them; this is one, of a single number.
    pub fn forget_graphs(&self) {
        let one = Tensor::<1>::ones([1], &self.device).autodiff().require_grad();
        let _ = (one.clone() * one).backward();
    }

    /// Most bytes in use at any boundary since the last call, where they were measured.
    pub fn take_most(&self) -> u64 {
        self.most.swap(0, Relaxed)
    }

    /// A boundary: takes a row of the log, and gives an error where more is, or since the phase's start was, in use
    /// than the limit allows.
    ///
    /// # Errors
    /// `Error::OutOfMemory` above the limit, with the accounts.
    pub fn boundary(&self, at: impl Into<Boundary>) -> Result<()> {
        beat();
        let reading = self.reading();
        let reading = match &self.log {
            Some(log) => log.record(at, reading),
            None => reading,
        };
        self.within_limit(reading)
    }

    /// A boundary at which work cannot be repeated: takes a row of the log.
    pub fn record(&self, at: impl Into<Boundary>) {
        beat();
        if let Some(log) = &self.log {
            log.record(at, self.reading_without_sync());
        }
    }

    /// A moment between two boundaries at which more may be in use than at either: raises the log's peak of the pools.
    /// The counted heap needs none.
    pub fn raise_peak(&self) {
        self.peak_reader()();
    }

    /// [`raise_peak`](Self::raise_peak) for code that knows no runtime.
    pub fn peak_reader(&self) -> impl Fn() + Send + Sync + use<> {
        let log = self.log.as_ref().filter(|_| !self.on_host);
        let (log, device) = (log.cloned(), self.device.clone());
        move || {
            if let Some(log) = &log
                && let Some(reading) = read_pools(&device)
            {
                log.raise_peak(reading);
            }
        }
    }

    /// An error where more is, or since the phase's start was, in use than the limit allows.
    ///
    /// # Errors
    /// `Error::OutOfMemory` above the limit, with the accounts.
    pub fn check(&self) -> Result<()> {
        let reading = self.limit.and_then(|_| self.reading());
        self.within_limit(reading.map(|reading| match &self.log {
            Some(log) => log.raise_peak(reading),
            None => reading,
        }))
    }

    /// The device's memory: the counted heap, or the pools, for a limit after waiting for the device.
    fn reading(&self) -> Option<Reading> {
        if self.on_host || self.limit.is_none() {
            return self.reading_without_sync();
        }
        Some(read(&self.device)).filter(|reading| reading.source != ReadingSource::None)
    }

    /// Memory read without a sync; pool statistics only if a log is attached.
    fn reading_without_sync(&self) -> Option<Reading> {
        if self.on_host {
            return counted_heap();
        }
        self.log.as_ref().and_then(|_| read_pools(&self.device))
    }

    fn within_limit(&self, reading: Option<Reading>) -> Result<()> {
        let Some((limit, reading)) = self.limit.zip(reading) else {
            return Ok(());
        };
        let used = reading.peak_bytes.unwrap_or(reading.in_use_bytes);
        if used <= limit {
            return Ok(());
        }
        Err(Error::OutOfMemory(Box::new(OutOfMemory {
            ranked: self.accounts.ranked(),
            ..OutOfMemory::new(Refused::over_limit(used, limit))
        })))
    }
}
