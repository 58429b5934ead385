//! Outputs and the cores that fill them.

use super::real::Real;
use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, Shape};
use pulp::Arch;
use rayon::prelude::*;

/// Elements below which one core is faster than telling the others.
const SMALL: usize = 1 << 15;

/// Bytes that a core fetches at once.
pub(super) const CACHE_LINE: usize = 64;

/// Runs a body of `#[inline(always)]` functions with the widest vectors of this machine. The closure says `#[inline(always)]`
/// itself: one that is called, for its size, runs with the narrow vectors that every machine has.
#[inline]
pub(super) fn vectorised<R>(body: impl FnOnce() -> R) -> R {
    Arch::new().dispatch(body)
}

/// `body(block, out)` for every block of `rows` rows of `out`, on all cores where that pays.
pub(super) fn by_rows<T: Real>(
    out: &mut [T],
    width: usize,
    rows: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let size = (rows * width).max(1);
    if out.len() <= SMALL {
        out.chunks_mut(size)
            .enumerate()
            .for_each(|(i, o)| body(i, o));
    } else {
        out.par_chunks_mut(size)
            .enumerate()
            .for_each(|(i, o)| body(i, o));
    }
}

/// The same over two outputs of as many rows each.
pub(super) fn by_rows_of_two<T: Real>(
    (a, a_width): (&mut [T], usize),
    (b, b_width): (&mut [T], usize),
    rows: usize,
    body: impl Fn(usize, &mut [T], &mut [T]) + Sync,
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

/// A tensor of these elements.
pub(super) fn tensor<T: Real>(values: Vec<T>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::new(
        Bytes::from_elems(values),
        Layout::contiguous(shape.into()),
        T::dtype(),
    )
}

/// A tensor's elements in order; the tensor must be contiguous.
pub(super) fn elements<T: Real>(tensor: &FlexTensor) -> &[T] {
    let (start, end) = tensor
        .layout()
        .contiguous_offsets()
        .unwrap_or_else(|| unreachable!("made contiguous before"));
    &tensor.storage()[start..end]
}

/// The dimensions of a tensor.
pub(super) fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    std::array::from_fn(|i| tensor.layout().shape()[i])
}

/// A pointer that several cores write through, each at places of its own.
#[derive(Clone, Copy)]
pub(super) struct Shared<T>(pub *mut T);

// SAFETY: whoever makes one gives each core places that no other writes or reads.
#[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
#[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer; a method, so that closures capture the whole and stay `Sync`.
    pub(super) fn get(self) -> *mut T {
        self.0
    }
}

/// Place for a tensor's elements that cores write through a pointer, without zeros that nobody would read.
pub(super) struct Room<T> {
    values: Vec<T>,
    len: usize,
}

impl<T: Real> Room<T> {
    pub(super) fn new(len: usize) -> Self {
        Self {
            values: Vec::with_capacity(len),
            len,
        }
    }

    /// Where the elements belong. Reading one before it is written is undefined.
    pub(super) fn place(&mut self) -> Shared<T> {
        Shared(self.values.as_mut_ptr())
    }

    /// The elements.
    ///
    /// # Safety
    /// All are written.
    #[allow(unsafe_code, reason = "nobody else knows what was written")]
    pub(super) unsafe fn filled(mut self) -> Vec<T> {
        // SAFETY: there is room, and the rest is the caller's.
        unsafe { self.values.set_len(self.len) };
        self.values
    }
}

/// Asks for the bytes at an address, which need not be any; nothing happens where processors have no way to be asked.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction, and no address makes it fail.
    #[allow(unsafe_code, reason = "an instruction")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
