//! Readings of memory, each with the word for where it comes from.

use crate::allocator;
use crate::device::{DeviceInfo, DeviceSpec};
use burn::tensor::Device;
use serde::Serialize;

/// Where a reading comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Bytes counted by the global allocator (CPU backend).
    CountedHeap,
    /// The backend's memory pool, sampled.
    BurnPool,
    /// No source: the program did not install the counting allocator.
    None,
}

/// Bytes of a device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// Where the numbers come from.
    pub source: Source,
    /// Held by live tensors (on the CPU: by anything on the heap).
    pub in_use_bytes: u64,
    /// Held by the pools, free pages included (on the CPU: the same).
    pub reserved_bytes: u64,
    /// Most in use, where the source keeps a peak.
    pub peak_bytes: Option<u64>,
}

/// Reads a device's memory. Waits for the device's queue, so call it at phase boundaries only.
#[must_use]
pub fn read(device: &Device) -> Reading {
    if device.memory_pool_usage().is_some() {
        // a failed sync shows up at the next read of a value; a reading is no place to report it
        let _ = device.sync();
    }
    match (device.memory_pool_usage(), allocator::heap()) {
        (Some(pool), _) => Reading {
            source: Source::BurnPool,
            in_use_bytes: pool.bytes_in_use,
            reserved_bytes: pool.bytes_reserved,
            peak_bytes: None,
        },
        (None, Some(heap)) => Reading {
            source: Source::CountedHeap,
            in_use_bytes: heap.current_bytes,
            reserved_bytes: heap.current_bytes,
            peak_bytes: Some(heap.peak_bytes),
        },
        (None, None) => Reading {
            source: Source::None,
            in_use_bytes: 0,
            reserved_bytes: 0,
            peak_bytes: None,
        },
    }
}

/// What a piece of code did to a device's memory: bytes before, after, and at most in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScopeReading {
    /// In use before.
    pub before_bytes: u64,
    /// In use after.
    pub after_bytes: u64,
    /// Most in use on the way, where the source keeps a peak (the counted heap); the larger of the two ends elsewhere.
    pub peak_bytes: u64,
}

/// Measures a piece of code. Scopes may be nested; the CPU's peak is that of the whole process.
#[derive(Debug)]
pub struct MemoryScope {
    device: Device,
    before: Reading,
    outer_peak: u64,
}

impl MemoryScope {
    /// Starts measuring.
    #[must_use]
    pub fn enter(device: &Device) -> Self {
        let before = read(device);
        allocator::reset_peak();
        Self {
            device: device.clone(),
            outer_peak: before.peak_bytes.unwrap_or(0),
            before,
        }
    }

    /// Stops measuring.
    #[must_use]
    pub fn finish(self) -> ScopeReading {
        let after = read(&self.device);
        let ends = self.before.in_use_bytes.max(after.in_use_bytes);
        ScopeReading {
            before_bytes: self.before.in_use_bytes,
            after_bytes: after.in_use_bytes,
            peak_bytes: after.peak_bytes.unwrap_or(ends),
        }
    }
}

impl Drop for MemoryScope {
    fn drop(&mut self) {
        // whoever measures around this scope keeps the larger peak
        allocator::raise_peak(self.outer_peak as usize);
    }
}

/// Bytes that `auto` budgets take, where they can be known: the memory that the system calls available for the CPU (Linux), the
/// whole capacity of a GPU as its driver reports it, whatever other programs hold there.
#[must_use]
pub fn free_bytes(info: &DeviceInfo) -> Option<u64> {
    if info.device != DeviceSpec::CPU {
        return info.memory_bytes;
    }
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Peak resident set of this process in bytes, where the system tells (Linux).
#[must_use]
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
