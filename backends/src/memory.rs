//! Readings of memory, each with the word for where it comes from.

use crate::allocator;
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

/// Peak resident set of this process in bytes, where the system tells (Linux).
#[must_use]
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
