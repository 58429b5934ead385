//! A pool's memory as kernels read and write it.
//!
//! The values of a block lie token by token, `[BLOCK_SIZE, dim]`. Its keys are transposed, `[dim, BLOCK_SIZE]`: the dot
//! products of a query with all of them are sums of vectors, without horizontal additions.

use super::int8::{encode, key_scale, pack_scales, value_scale};
use super::vectors::{Stored, Vectors};
use crate::cpu::parallel::SharedPtr;
use firebrick_spec::BLOCK_SIZE;

/// Keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Key,
    Value,
}

/// Offset of a row's key, whose numbers are [`BLOCK_SIZE`] apart.
#[inline(always)]
pub(super) fn key_start(row: usize, dim: usize) -> usize {
    (row - row % BLOCK_SIZE) * dim + row % BLOCK_SIZE
}

/// The keys and values of a pool for queries in `T`, by rows: row `head · slots + slot` is a token's, with one head.
pub(super) trait Storage<T: Vectors>: Copy + Sync {
    type Number: Stored<T>;
    /// True if numbers are codes to be multiplied by a scale.
    const SCALED: bool;

    /// The first number of all keys or values.
    fn start(self, kind: Kind) -> SharedPtr<Self::Number>;

    /// Multiplies factors of consecutive rows, the first of which is `first`, by their scales, if numbers have scales.
    ///
    /// # Safety
    /// There are as many rows, and no task writes to them meanwhile.
    unsafe fn rescale(self, kind: Kind, first: usize, factors: &mut [T]);

    /// The address of the scales of a row, if numbers have scales.
    fn scales(self, row: usize) -> *const u8;

    /// Writes a key and a value as a row.
    ///
    /// # Safety
    /// The pool has the row, and no other task reads or writes it meanwhile.
    unsafe fn write(self, row: usize, key: &[T], value: &[T]);
}

/// A pool in `T` itself.
#[derive(Clone, Copy)]
pub(super) struct Plain<T> {
    /// Keys and values.
    pub(super) numbers: [SharedPtr<T>; 2],
}

impl<T: Vectors> Storage<T> for Plain<T> {
    type Number = T;
    const SCALED: bool = false;

    #[inline(always)]
    fn start(self, kind: Kind) -> SharedPtr<T> {
        self.numbers[kind as usize]
    }

    #[inline(always)]
    unsafe fn rescale(self, _: Kind, _: usize, _: &mut [T]) {}

    #[inline(always)]
    fn scales(self, _: usize) -> *const u8 {
        std::ptr::null()
    }

    #[inline(always)]
    unsafe fn write(self, row: usize, key: &[T], value: &[T]) {
        // SAFETY: the caller's promise.
        unsafe {
            let keys = self.numbers[0].get().add(key_start(row, key.len()));
            for (i, &x) in key.iter().enumerate() {
                keys.add(i * BLOCK_SIZE).write(x);
            }
            let values = self.numbers[1].get().add(row * value.len());
            values.copy_from_nonoverlapping(value.as_ptr(), value.len());
        }
    }
}

/// A pool in 8 bits.
#[derive(Clone, Copy)]
pub(super) struct Int8 {
    /// Codes of keys and values.
    pub(super) codes: [SharedPtr<i8>; 2],
    pub(super) scales: SharedPtr<i32>,
}

impl<T: Vectors> Storage<T> for Int8
where
    i8: Stored<T>,
    f32: Into<T>,
{
    type Number = i8;
    const SCALED: bool = true;

    #[inline(always)]
    fn start(self, kind: Kind) -> SharedPtr<i8> {
        self.codes[kind as usize]
    }

    #[inline(always)]
    unsafe fn rescale(self, kind: Kind, first: usize, factors: &mut [T]) {
        // SAFETY: the caller's promise.
        let scales = unsafe { std::slice::from_raw_parts(self.scales.get().add(first), factors.len()) };
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
        // SAFETY: the caller's promise.
        unsafe {
            let keys = self.codes[0].get().add(key_start(row, key.len()));
            let key_scale = encode(key, |i, code| keys.add(i * BLOCK_SIZE).write(code));
            let values = self.codes[1].get().add(row * value.len());
            let value_scale = encode(value, |i, code| values.add(i).write(code));
            self.scales.get().add(row).write(pack_scales(key_scale, value_scale));
        }
    }
}
