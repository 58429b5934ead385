//! A global allocator that counts bytes: exact memory readings of the CPU backend.
//!
//! A program opts in with
//! `#[global_allocator] static ALLOCATOR: CountingAllocator = CountingAllocator;`.

use crate::allocation_limit::{charge, release};
use crate::allocation_trace;
use crate::out_of_memory::OutOfMemory;
use libmimalloc_sys::{mi_option_large_os_pages, mi_option_set_default, mi_option_t};
use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Called with the size of an allocation that the system refused, before the process ends.
static ON_REFUSAL: OnceLock<fn(usize)> = OnceLock::new();

/// Sets a handler for a failed allocation. The process is about to abort; the handler must not allocate.
pub fn on_refusal(report: fn(usize)) {
    // set once, at the program's start
    let _ = ON_REFUSAL.set(report);
}

/// Keeps freed memory for later allocations instead of returning it to the system within milliseconds, and asks for
/// large pages. Training frees and allocates the same large tensors repeatedly; page faults would cost a third of an
/// update. `MIMALLOC_*` environment variables take precedence.
pub fn keep_freed_memory() {
    /// Milliseconds until freed memory returns to the system, −1 for never; mimalloc's `mi_option_purge_delay`.
    const PURGE_DELAY: mi_option_t = 15;
    // SAFETY: both options exist in the mimalloc that is linked, and may be set at any time.
    #[allow(unsafe_code, reason = "mimalloc is written in C")]
    unsafe {
        mi_option_set_default(PURGE_DELAY, -1);
        mi_option_set_default(mi_option_large_os_pages, 1);
    }
}

fn refused(bytes: usize) {
    if let Some(report) = ON_REFUSAL.get() {
        report(bytes);
    }
}

/// mimalloc, with every byte counted.
#[derive(Debug)]
pub struct CountingAllocator;

fn grew(address: usize, bytes: usize) {
    if allocation_trace::traces_heap() && !allocation_trace::allocated(address, bytes) {
        return;
    }
    let now = CURRENT.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
}

/// Called before the memory is given back, so that a trace never has an address twice; only a block that moves has left
/// already.
fn shrinks(address: usize, bytes: usize) {
    if allocation_trace::traces_heap() && !allocation_trace::freed(address, bytes) {
        return;
    }
    CURRENT.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is handed to mimalloc unchanged; the counters touch no memory of the caller's.
#[allow(unsafe_code, reason = "GlobalAlloc is an unsafe trait")]
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise is passed on.
        let p = unsafe { MiMalloc.alloc(layout) };
        if p.is_null() {
            refused(layout.size());
        } else {
            grew(p.addr(), layout.size());
        }
        p
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size());
        // SAFETY: the caller's promise is passed on.
        let p = unsafe { MiMalloc.alloc_zeroed(layout) };
        if p.is_null() {
            refused(layout.size());
        } else {
            grew(p.addr(), layout.size());
        }
        p
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        shrinks(p.addr(), layout.size());
        release(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { MiMalloc.dealloc(p, layout) };
    }

    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        release(layout.size());
        charge(size);
        // SAFETY: the caller's promise is passed on.
        let q = unsafe { MiMalloc.realloc(p, layout, size) };
        if q.is_null() {
            refused(size);
        } else {
            shrinks(p.addr(), layout.size());
            grew(q.addr(), size);
        }
        q
    }
}

/// Pages of zeros from the system, counted like what the allocator gives: all of them, although the system takes memory
/// for those alone that are written. They go back to the system when dropped.
#[derive(Debug)]
pub struct CountedPages {
    pages: memmap2::MmapMut,
    /// The counts: nothing in a program that counts nothing else.
    counted: usize,
}

/// Pages for so many bytes, unless the system refuses.
///
/// # Errors
/// The system's refusal.
pub fn map_pages(bytes: usize) -> Result<CountedPages, OutOfMemory> {
    let refused = |e| OutOfMemory::system(Some(bytes as u64), "the system, mmap", &e);
    let pages = memmap2::MmapMut::map_anon(bytes).map_err(refused)?;
    let counted = heap().map_or(0, |_| bytes);
    if counted > 0 {
        grew(pages.as_ptr().addr(), counted);
    }
    Ok(CountedPages { pages, counted })
}

impl CountedPages {
    /// The mapped bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.pages
    }

    /// The mapped bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.pages
    }
}

impl Drop for CountedPages {
    fn drop(&mut self) {
        if self.counted > 0 {
            shrinks(self.pages.as_ptr().addr(), self.counted);
        }
    }
}

/// Bytes counted so far: `None` in a program that did not install the allocator.
pub fn heap() -> Option<HeapReading> {
    let peak_bytes = PEAK.load(Relaxed) as u64;
    (peak_bytes > 0).then(|| HeapReading { current_bytes: CURRENT.load(Relaxed) as u64, peak_bytes })
}

/// Sets the peak to what is allocated now.
pub fn reset_peak() {
    PEAK.store(CURRENT.load(Relaxed), Relaxed);
}

/// Makes the peak at least this large.
pub(crate) fn raise_peak(bytes: usize) {
    PEAK.fetch_max(bytes, Relaxed);
}

/// Runs work whose own peak shows in no reading: what a run writes down of its memory is not part of it.
pub fn without_peak<T>(work: impl FnOnce() -> T) -> T {
    let peak = PEAK.load(Relaxed);
    let result = work();
    reset_peak();
    raise_peak(peak);
    result
}

/// A reading of the counted heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeapReading {
    /// Allocated now.
    pub current_bytes: u64,
    /// Peak since the start, or since [`reset_peak`].
    pub peak_bytes: u64,
}
