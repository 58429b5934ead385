//! Parallel loops over outputs, and the buffers that they write.

use super::real::Real;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, Element, Shape};
use firebrick_device::team::{leads, run_on_team};
use rayon::prelude::*;

/// Elements up to which one thread is faster than several, and where a team leads them.
const SMALL: usize = 1 << 15;
const SMALL_FOR_TEAM: usize = 1 << 11;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Runs code that calls `#[inline(always)]` functions with the widest vector instructions of this machine.
macro_rules! vectorised {
    ($code:expr) => {{
        let once = crate::cpu::parallel::Once;
        crate::cpu::widest::with_widest(
            // otherwise it may be compiled for the baseline instruction set
            #[inline(always)]
            || {
                let _once = once;
                $code
            },
        )
    }};
}
pub(super) use vectorised;

/// Moved into a closure that only borrows, it leaves no way to call it but by value: a closure that may be called again
/// has a `call_once` around it, which is compiled for the baseline instruction set and not always inlined.
pub(super) struct Once;

/// `body(task)` for every task, on all cores.
pub(super) fn for_each(tasks: usize, body: impl Fn(usize) + Sync + Send) {
    for_each_init(tasks, || (), |(), task| body(task));
}

/// `body(scratch, task)` for every task, on all cores; `scratch` makes that of some tasks, which one thread runs.
pub(super) fn for_each_init<S>(
    tasks: usize,
    scratch: impl Fn() -> S + Sync + Send,
    body: impl Fn(&mut S, usize) + Sync + Send,
) {
    let some = |indices: &mut dyn Iterator<Item = usize>| {
        let mut scratch = scratch();
        for task in indices {
            body(&mut scratch, task);
        }
    };
    if !run_on_team(tasks, &some) {
        (0..tasks).into_par_iter().for_each_init(&scratch, &body);
    }
}

/// [`for_each_init`] where there is enough to do; else on this thread.
pub(super) fn for_each_if<S>(
    much: bool,
    tasks: usize,
    scratch: impl Fn() -> S + Sync + Send,
    body: impl Fn(&mut S, usize) + Sync + Send,
) {
    if much {
        return for_each_init(tasks, scratch, body);
    }
    let mut scratch = scratch();
    (0..tasks).for_each(|task| body(&mut scratch, task));
}

/// Returns true if work on so many elements is done by one thread.
fn is_small(elements: usize) -> bool {
    elements <= if leads() { SMALL_FOR_TEAM } else { SMALL }
}

/// `body(block, out)` for every block of `rows` rows of `out`, in parallel unless `out` is small.
pub(super) fn by_rows<T: Real>(out: &mut [T], width: usize, rows: usize, body: impl Fn(usize, &mut [T]) + Sync + Send) {
    let size = (rows * width).max(1);
    if is_small(out.len()) {
        out.chunks_mut(size).enumerate().for_each(|(i, o)| body(i, o));
    } else {
        let (len, start) = (out.len(), SharedPtr(out.as_mut_ptr()));
        for_each(len.div_ceil(size), |block| {
            let at = block * size;
            // SAFETY: blocks are disjoint parts of `out`.
            let out = unsafe { start.slice(at, size.min(len - at)) };
            body(block, out);
        });
    }
}

/// `body(index, chunk)` for every chunk of `size` elements, on all cores if `parallel`.
pub(super) fn by_chunks<E: Send>(
    out: &mut [E],
    size: usize,
    parallel: bool,
    body: impl Fn(usize, &mut [E]) + Sync + Send,
) {
    if parallel {
        out.par_chunks_mut(size).enumerate().for_each(|(i, out)| body(i, out));
    } else {
        out.chunks_mut(size).enumerate().for_each(|(i, out)| body(i, out));
    }
}

/// [`by_rows`] for two outputs of as many rows each.
pub(super) fn by_rows_of_two<T: Real>(
    (a, a_width): (&mut [T], usize),
    (b, b_width): (&mut [T], usize),
    rows: usize,
    body: impl Fn(usize, &mut [T], &mut [T]) + Sync + Send,
) {
    let (a_size, b_size) = ((rows * a_width).max(1), (rows * b_width).max(1));
    if a.len() <= SMALL {
        let blocks = a.chunks_mut(a_size).zip(b.chunks_mut(b_size));
        blocks.enumerate().for_each(|(i, (a, b))| body(i, a, b));
    } else {
        let blocks = a.par_chunks_mut(a_size).zip(b.par_chunks_mut(b_size));
        blocks.enumerate().for_each(|(i, (a, b))| body(i, a, b));
    }
}

/// A contiguous tensor of these elements.
pub(super) fn tensor<T: Element + bytemuck::Pod>(values: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape.into()), T::dtype())
}

/// The elements of a contiguous tensor.
pub(super) fn elements<T: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[T] {
    let (start, end) = offsets(tensor);
    &tensor.storage()[start..end]
}

/// [`elements`] to write; copies a tensor that is shared.
pub(super) fn elements_mut<T: Element + bytemuck::Pod>(tensor: &mut FlexTensor) -> &mut [T] {
    let (start, end) = offsets(tensor);
    &mut tensor.storage_mut()[start..end]
}

fn offsets(tensor: &FlexTensor) -> (usize, usize) {
    let offsets = tensor.layout().contiguous_offsets();
    offsets.unwrap_or_else(|| unreachable!("the caller made it contiguous"))
}

/// The dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// A pointer that several threads write through, each to elements of its own.
#[derive(Clone, Copy)]
pub(super) struct SharedPtr<T>(pub *mut T);

// SAFETY: whoever creates one gives each thread elements that no other writes or reads.
unsafe impl<T: Send> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    /// The pointer; a method, so that closures capture the whole and stay `Sync`.
    pub(super) fn get(self) -> *mut T {
        self.0
    }

    /// Some elements, from an index on.
    ///
    /// # Safety
    /// They are in the buffer, and no other thread accesses them as long as the slice lives.
    #[inline(always)]
    pub(super) unsafe fn slice<'a>(self, at: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

/// The uninitialised elements of a tensor, written through a pointer.
pub(super) struct UninitBuffer<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Real> UninitBuffer<T> {
    pub(super) fn new(len: usize) -> Self {
        Self { values: Vec::with_capacity(len), len }
    }

    /// The first element. Reading one before it is written is undefined behaviour.
    pub(super) fn pointer(&mut self) -> SharedPtr<T> {
        SharedPtr(self.values.as_mut_ptr())
    }

    /// The elements.
    ///
    /// # Safety
    /// All elements are written.
    pub(super) unsafe fn assume_init(mut self) -> Vec<T> {
        // SAFETY: the capacity suffices, and the caller wrote all elements.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// Prefetches the cache line at an address, which need not be valid. Does nothing where the processor has no such
/// instruction.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction, and no address makes it fail.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
