//! Readings of memory, each with its source.

use crate::allocator;
use crate::device::{Backend, DeviceInfo, DeviceSpec, list};
use crate::driver_memory::DriverMemory;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};

/// Source of a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadingSource {
    /// Bytes counted by the global allocator (CPU backend).
    CountedHeap,
    /// The backend's memory pools, those of all streams of the device together.
    BurnPool,
    /// None: the program did not install the counting allocator.
    None,
}

/// Source of a peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeakSource {
    /// Every allocation of the global allocator (CPU backend): nothing is missed.
    CountedHeap,
    /// The largest of the readings of the pools at segment boundaries and at the largest moments between them (GPUs).
    /// Memory allocated and freed between two readings is missed; bytes reserved are the bound from above.
    PoolAtBoundaries,
}

/// Bytes of a device at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Reading {
    /// The source of the values.
    pub source: ReadingSource,
    /// Held by live tensors (on the CPU: by anything on the heap).
    pub in_use_bytes: u64,
    /// Held by the pools, free pages included (on the CPU: the same).
    pub reserved_bytes: u64,
    /// Peak in use, where the source records it, or readings were kept.
    pub peak_bytes: Option<u64>,
}

/// The pools of a device, all streams together, as they are after what this thread has asked for so far, without
/// waiting for the device; `None` where there are no pools (the CPU).
///
/// The backend reserves a buffer when the work that writes it is submitted, and frees it, for work that comes after it
/// in its stream, when the last handle to it is dropped. So its count is that of the work submitted and not of the work
/// done, and waiting for the device changes nothing about it. A reading is a round trip to the thread that submits work
/// to the device, which first submits what stands before it in its queue; the device continues meanwhile.
pub fn read_pools(device: &Device) -> Option<Reading> {
    device.memory_pool_usage().map(|pool| Reading {
        source: ReadingSource::BurnPool,
        in_use_bytes: pool.bytes_in_use,
        reserved_bytes: pool.bytes_reserved,
        peak_bytes: None,
    })
}

/// Reads a device's memory. Synchronises with the device, so call it at phase boundaries only.
pub fn read(device: &Device) -> Reading {
    if device.memory_pool_usage().is_some() {
        // an error of the device is reported by the next read of a tensor
        let _ = device.sync();
    }
    match (read_pools(device), counted_heap()) {
        (Some(pools), _) => pools,
        (None, Some(heap)) => heap,
        (None, None) => Reading { source: ReadingSource::None, in_use_bytes: 0, reserved_bytes: 0, peak_bytes: None },
    }
}

/// The counted heap, without waiting for anything; none in a program that did not install the counting allocator.
pub fn counted_heap() -> Option<Reading> {
    allocator::heap().map(|heap| Reading {
        source: ReadingSource::CountedHeap,
        in_use_bytes: heap.current_bytes,
        reserved_bytes: heap.current_bytes,
        peak_bytes: Some(heap.peak_bytes),
    })
}

/// A device's memory around a piece of code: bytes before, after, and the peak in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ScopeReading {
    /// In use before.
    pub before_bytes: u64,
    /// In use after.
    pub after_bytes: u64,
    /// Peak in use, where the source records it (the counted heap); elsewhere the larger of before and after.
    pub peak_bytes: u64,
}

/// Measures the memory of a piece of code. Scopes may be nested; on the CPU the peak is that of the whole process.
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
        Self { device: device.clone(), outer_peak: before.peak_bytes.unwrap_or(0), before }
    }

    /// Stops measuring.
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
        // an enclosing scope must see the larger peak
        allocator::raise_peak(self.outer_peak as usize);
    }
}

/// Bytes that `auto` budgets take, where they can be known: the memory that the system calls available for the CPU
/// (Linux); on CUDA what the driver has free, and what this program's pools have reserved already. Elsewhere, and where
/// the driver does not say, the whole capacity of a GPU, whatever other programs hold there.
pub fn free_bytes(info: &DeviceInfo) -> Option<u64> {
    match info.device {
        DeviceSpec::Auto => None,
        DeviceSpec::Named { backend, index } => match backend {
            Backend::Cpu => available_bytes(),
            Backend::Cuda => {
                let free = list(backend).get(index).and_then(free_on);
                free.or(info.memory_bytes)
            }
            Backend::Metal | Backend::Vulkan | Backend::Wgpu => info.memory_bytes,
        },
    }
}

/// Bytes that a device's driver has free for this program, whose pools may have pages there already.
fn free_on(device: &Device) -> Option<u64> {
    let driver = DriverMemory::new(device).read()?;
    let reserved = read_pools(device).map_or(0, |pools| pools.reserved_bytes);
    Some((driver.free_bytes + reserved).min(driver.total_bytes))
}

/// Bytes of the host that the system calls available (Linux).
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Peak resident set size of this process in bytes, where the system reports it (Linux).
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
