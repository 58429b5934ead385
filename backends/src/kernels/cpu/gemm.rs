//! Matrix products through the `gemm` crate, on strided matrices.

use super::real::Real;
use gemm::Parallelism;

/// The dimensions of a product: `[m, k] · [k, n]`.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

/// A matrix to read: its first element, and the strides of rows and columns.
pub(super) struct Matrix<T> {
    pub start: *const T,
    pub row: usize,
    pub column: usize,
}

/// A matrix to write, with columns of stride 1.
pub(super) struct Target<T> {
    pub start: *mut T,
    /// Stride of rows.
    pub row: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
}

impl<T> Clone for Matrix<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Matrix<T> {}

impl<T> Clone for Target<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Target<T> {}

/// `out = a · b`, or `out += a · b`.
pub(super) fn multiply<T: Real>(
    size: Size,
    out: Target<T>,
    a: Matrix<T>,
    b: Matrix<T>,
    parallelism: Parallelism,
) {
    let (scale, one) = (if out.add { T::ONE } else { T::ZERO }, T::ONE);
    // SAFETY: callers pass matrices of this size and these strides, and no other thread writes the target.
    #[allow(unsafe_code, reason = "the gemm crate takes pointers")]
    unsafe {
        gemm::gemm(
            size.m,
            size.n,
            size.k,
            out.start,
            1,
            out.row as isize,
            out.add,
            a.start,
            a.column as isize,
            a.row as isize,
            b.start,
            b.column as isize,
            b.row as isize,
            scale,
            one,
            false,
            false,
            false,
            parallelism,
        );
    }
}
