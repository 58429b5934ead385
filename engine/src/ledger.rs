//! Bytes by phase, as measured.

use firebrick_backends::allocator;
use firebrick_backends::memory::{Reading, read};
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
    entries: Vec<LedgerEntry>,
}

impl Ledger {
    /// A ledger that goes on from an earlier peak.
    #[must_use]
    pub fn new(peak_bytes: u64) -> Self {
        Self {
            peak_bytes,
            entries: Vec::new(),
        }
    }

    /// Starts a phase: its peak is counted from here.
    pub fn begin(&self) {
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

    /// Largest bytes so far.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// Entries since the last call.
    pub fn take(&mut self) -> Vec<LedgerEntry> {
        std::mem::take(&mut self.entries)
    }
}
