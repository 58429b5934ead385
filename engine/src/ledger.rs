//! Bytes by phase, as measured.

use firebrick_backends::allocator;
use firebrick_backends::memory::{Reading, Source, read};
use serde::Serialize;

/// One line of `memory.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub struct LedgerEntry {
    /// Training step.
    pub step: u64,
    /// Phase that had just ended.
    pub phase: &'static str,
    /// What was read.
    #[serde(flatten)]
    pub reading: Reading,
}

/// Reads the device's memory at the end of each phase and keeps the largest reading.
#[derive(Debug)]
pub struct Ledger {
    peak_bytes: u64,
    /// Tensors live on the counted heap.
    on_host: bool,
    entries: Vec<LedgerEntry>,
}

impl Ledger {
    /// A ledger that goes on from an earlier peak.
    #[must_use]
    pub fn new(peak_bytes: u64, device: &burn::tensor::Device) -> Self {
        Self {
            peak_bytes,
            on_host: read(device).source == Source::CountedHeap,
            entries: Vec::new(),
        }
    }

    /// Starts a phase: its peak is counted from here.
    pub fn begin(&mut self) {
        // what lay between two phases (loading, saving) counts for the run
        self.absorb_heap();
        allocator::reset_peak();
    }

    /// Ends a phase.
    pub fn end(&mut self, step: u64, phase: &'static str, device: &burn::tensor::Device) {
        let reading = read(device);
        self.peak_bytes = self
            .peak_bytes
            .max(reading.peak_bytes.unwrap_or(reading.reserved_bytes));
        self.entries.push(LedgerEntry {
            step,
            phase,
            reading,
        });
    }

    /// Largest bytes so far, on the CPU with what was allocated since the last phase.
    #[must_use]
    pub fn peak_bytes(&mut self) -> u64 {
        self.absorb_heap();
        self.peak_bytes
    }

    fn absorb_heap(&mut self) {
        if let (true, Some(heap)) = (self.on_host, allocator::heap()) {
            self.peak_bytes = self.peak_bytes.max(heap.peak_bytes);
        }
    }

    /// Entries since the last call.
    pub fn take(&mut self) -> Vec<LedgerEntry> {
        std::mem::take(&mut self.entries)
    }
}
