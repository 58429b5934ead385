//! Measured bytes by phase and category: peaks and growth.

mod growth;

pub use growth::{Growth, Leak};

use crate::executor::{BoundaryKind, BoundaryLog};
use crate::metrics::Phase;
use firebrick_backends::accounts::{Accounts, Balance, Home};
use firebrick_backends::allocator;
use firebrick_backends::driver_memory::DriverMemory;
use firebrick_backends::memory::{PeakSource, Reading, ReadingSource, counted_heap, read, read_pools};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One line of `memory.jsonl`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct LedgerEntry {
    /// Training step.
    pub step: u64,
    /// Phase that ended.
    pub phase: Phase,
    /// Reading, with the peak of the phase if it is known.
    #[serde(flatten)]
    pub reading: Reading,
    /// Source of the peak.
    pub peak_source: Option<PeakSource>,
    /// Free bytes of the device according to the driver (CUDA).
    pub driver_free_bytes: Option<u64>,
    /// Bytes of the device according to the driver (CUDA).
    pub driver_total_bytes: Option<u64>,
    /// Bytes of the accounts, at the end of the phase and at their peak. Other bytes of the reading are graphs,
    /// temporaries and the program.
    pub accounts: Vec<Balance>,
}

impl LedgerEntry {
    /// Used bytes of the device according to the driver, with other programs.
    pub fn driver_used_bytes(&self) -> Option<u64> {
        Some(self.driver_total_bytes?.saturating_sub(self.driver_free_bytes?))
    }
}

/// Reads the device's memory at the end of each phase and keeps the largest readings.
#[derive(Debug)]
pub struct Ledger {
    peak_bytes: u64,
    /// Largest bytes by phase in this session.
    pub(crate) phases: BTreeMap<Phase, u64>,
    device: burn::tensor::Device,
    driver: DriverMemory,
    /// True if tensors are on the counted heap.
    on_host: bool,
    accounts: Arc<Accounts>,
    /// Log of all boundaries, including those of phases.
    log: Arc<BoundaryLog>,
    entries: Vec<LedgerEntry>,
    growth: Growth,
}

impl Ledger {
    /// A ledger that continues from an earlier peak.
    pub fn new(
        peak_bytes: u64,
        device: &burn::tensor::Device,
        accounts: &Arc<Accounts>,
        log: &Arc<BoundaryLog>,
    ) -> Self {
        Self {
            peak_bytes,
            phases: BTreeMap::new(),
            device: device.clone(),
            driver: DriverMemory::new(device),
            on_host: read(device).source == ReadingSource::CountedHeap,
            accounts: Arc::clone(accounts),
            log: Arc::clone(log),
            entries: Vec::new(),
            growth: Growth::default(),
        }
    }

    /// Begins a phase and its peak.
    pub fn begin(&mut self, step: u64, phase: Phase) {
        self.reset_peaks();
        self.log.begin_phase(step, phase.name(), self.now());
    }

    /// Restarts a phase and its peak, under another plan.
    pub fn restart(&mut self) {
        self.reset_peaks();
        self.log.restart_phase(self.now());
    }

    fn reset_peaks(&mut self) {
        // memory between two phases (loading, saving) counts for the run
        self.absorb_heap();
        allocator::reset_peak();
        self.accounts.reset_peaks();
    }

    fn heap(&self) -> Option<Reading> {
        counted_heap().filter(|_| self.on_host)
    }

    /// Memory of the device, without waiting for it.
    fn now(&self) -> Option<Reading> {
        self.heap().or_else(|| read_pools(&self.device))
    }

    /// Ends a phase, and waits for the device.
    pub fn end(&mut self, step: u64, phase: Phase) {
        let reading = read(&self.device);
        let known = Some(reading).filter(|reading| reading.source != ReadingSource::None);
        // the row of the boundary has the peak of the pools
        let reading = self.log.record(BoundaryKind::End, known).unwrap_or(reading);
        // bytes that count against a budget: the heap's peak, or the reserved bytes of pools
        let (peak, peak_source) = match (reading.source, self.log.pool_peak()) {
            (ReadingSource::BurnPool, Some(pools)) => (pools.reserved_bytes, Some(PeakSource::PoolAtBoundaries)),
            _ => {
                let source = reading.peak_bytes.map(|_| PeakSource::CountedHeap);
                (reading.peak_bytes.unwrap_or(reading.reserved_bytes), source)
            }
        };
        let driver = self.driver.read();
        self.peak_bytes = self.peak_bytes.max(peak);
        let phase_peak = self.phases.entry(phase).or_default();
        *phase_peak = (*phase_peak).max(peak);
        self.entries.push(LedgerEntry {
            step,
            phase,
            reading,
            peak_source,
            driver_free_bytes: driver.map(|d| d.free_bytes),
            driver_total_bytes: driver.map(|d| d.total_bytes),
            accounts: self.accounts.balances(),
        });
    }

    /// Largest bytes so far, on the CPU including the time since the last phase.
    pub fn peak_bytes(&mut self) -> u64 {
        self.absorb_heap();
        self.peak_bytes
    }

    /// Ends a step: adds its last reading to the trend. Returns a leak once it is certain.
    pub fn close_step(&mut self) -> Option<Leak> {
        let last = self.entries.last()?;
        let balances = last.accounts.iter().map(|balance| {
            let home = if balance.home == Home::Host { " (host)" } else { "" };
            (format!("{}{home}", balance.category.name()), balance.bytes as f64)
        });
        self.growth.add(last.reading.in_use_bytes as f64, balances.collect())
    }

    fn absorb_heap(&mut self) {
        let peak = self.heap().and_then(|heap| heap.peak_bytes);
        self.peak_bytes = self.peak_bytes.max(peak.unwrap_or(0));
    }

    /// Entries since the last call.
    pub fn take(&mut self) -> Vec<LedgerEntry> {
        std::mem::take(&mut self.entries)
    }
}
