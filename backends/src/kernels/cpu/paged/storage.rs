//! A pool's memory as kernels read and write it.

use super::int8::{encode, key_scale, pack_scales, value_scale};
use super::vectors::{Stored, Vectors};
use crate::kernels::cpu::parallel::SharedPtr;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Key,
    Value,
}

/// The keys and values of a pool for queries in `T`, by rows: row `head · slots + slot` is a token's, with one head.
pub(super) trait Storage<T: Vectors>: Copy + Sync {
    type Number: Stored<T>;
    /// Whether numbers are codes to be multiplied by a scale.
    const SCALED: bool;

    /// The first number of all keys or values.
    fn start(self, kind: Kind) -> SharedPtr<Self::Number>;

    /// Multiplies factors of consecutive rows, the first of which is `first`, by their scales, if numbers have scales.
    ///
    /// # Safety
    /// There are as many rows, and no task writes to them meanwhile.
    #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
    unsafe fn rescale(self, kind: Kind, first: usize, factors: &mut [T]);

    /// The address of the scales of a row, if numbers have scales.
    fn scales(self, row: usize) -> *const u8;

    /// Writes a key and a value as a row.
    ///
    /// # Safety
    /// The pool has the row, and no other task reads or writes it meanwhile.
    #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
    unsafe fn write(self, row: usize, key: &[T], value: &[T]);
}

/// A pool in `T` itself.
#[derive(Clone, Copy)]
pub(super) struct Plain<T> {
    pub(super) keys: SharedPtr<T>,
    pub(super) values: SharedPtr<T>,
}

#[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
impl<T: Vectors> Storage<T> for Plain<T> {
    type Number = T;
    const SCALED: bool = false;

    #[inline(always)]
    fn start(self, kind: Kind) -> SharedPtr<T> {
        match kind {
            Kind::Key => self.keys,
            Kind::Value => self.values,
        }
    }

    #[inline(always)]
    unsafe fn rescale(self, _: Kind, _: usize, _: &mut [T]) {}

    #[inline(always)]
    fn scales(self, _: usize) -> *const u8 {
        std::ptr::null()
    }

    #[inline(always)]
    unsafe fn write(self, row: usize, key: &[T], value: &[T]) {
        for (to, from) in [(self.keys, key), (self.values, value)] {
            // SAFETY: the caller's promise.
            unsafe {
                let to = to.get().add(row * from.len());
                to.copy_from_nonoverlapping(from.as_ptr(), from.len());
            }
        }
    }
}

/// A pool in 8 bits.
#[derive(Clone, Copy)]
pub(super) struct Int8 {
    pub(super) keys: SharedPtr<i8>,
    pub(super) values: SharedPtr<i8>,
    pub(super) scales: SharedPtr<i32>,
}

#[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
impl<T: Vectors> Storage<T> for Int8
where
    i8: Stored<T>,
    f32: Into<T>,
{
    type Number = i8;
    const SCALED: bool = true;

    #[inline(always)]
    fn start(self, kind: Kind) -> SharedPtr<i8> {
        match kind {
            Kind::Key => self.keys,
            Kind::Value => self.values,
        }
    }

    #[inline(always)]
    unsafe fn rescale(self, kind: Kind, first: usize, factors: &mut [T]) {
        // SAFETY: the caller's promise.
        let scales =
            unsafe { std::slice::from_raw_parts(self.scales.get().add(first), factors.len()) };
        for (factor, &word) in factors.iter_mut().zip(scales) {
            let scale = match kind {
                Kind::Key => key_scale(word),
                Kind::Value => value_scale(word),
            };
            *factor = *factor * scale.into();
        }
    }

    #[inline(always)]
    fn scales(self, row: usize) -> *const u8 {
        self.scales.get().wrapping_add(row).cast()
    }

    #[inline(always)]
    unsafe fn write(self, row: usize, key: &[T], value: &[T]) {
        let code = |to: SharedPtr<i8>, from: &[T]| {
            // SAFETY: the caller's promise.
            let to = unsafe {
                std::slice::from_raw_parts_mut(to.get().add(row * from.len()), from.len())
            };
            encode(from, to)
        };
        let word = pack_scales(code(self.keys, key), code(self.values, value));
        // SAFETY: the caller's promise.
        unsafe { self.scales.get().add(row).write(word) }
    }
}
