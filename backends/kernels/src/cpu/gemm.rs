//! Matrix products through the `gemm` crate, on strided matrices.

use super::real::Real;
use gemm::Parallelism;

/// Multiplications from which a product runs in parallel.
const LARGE: usize = 1 << 20;

/// The dimensions of a product: `[m, k] · [k, n]`.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub m: usize,
    pub k: usize,
    pub n: usize,
}

impl Size {
    /// All cores, where there is enough to do.
    pub fn parallelism(self) -> Parallelism {
        if self.m * self.k * self.n < LARGE { Parallelism::None } else { Parallelism::Rayon(0) }
    }
}

/// A matrix to read: its first element, and the strides of rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub start: *const T,
    pub row: usize,
    pub column: usize,
}

/// A matrix to write, with columns of stride 1.
#[derive(Clone, Copy)]
pub(super) struct Target<T> {
    pub start: *mut T,
    /// Stride of rows.
    pub row: usize,
    /// True if the product is added to what is there.
    pub add: bool,
}

impl<T> Matrix<T> {
    /// A matrix whose rows are so many numbers apart, from the first of these numbers on.
    pub fn row_major(values: &[T], row: usize) -> Self {
        Self { start: values.as_ptr(), row, column: 1 }
    }

    pub fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }

    /// The matrix from a row and a column on.
    pub fn part(self, row: usize, column: usize) -> Self {
        Self { start: self.start.wrapping_add(row * self.row + column * self.column), ..self }
    }
}

impl<T> Target<T> {
    /// A matrix whose rows are so many numbers apart, from the first of these numbers on.
    pub fn new(values: &mut [T], row: usize, add: bool) -> Self {
        Self { start: values.as_mut_ptr(), row, add }
    }

    /// The matrix from a row on.
    pub fn part(self, row: usize) -> Self {
        Self { start: self.start.wrapping_add(row * self.row), ..self }
    }
}

/// `out = a · b`, or `out += a · b`.
pub(super) fn multiply<T: Real>(size: Size, out: Target<T>, a: Matrix<T>, b: Matrix<T>, parallelism: Parallelism) {
    let (scale, one) = (if out.add { T::ONE } else { T::ZERO }, T::ONE);
    // SAFETY: callers pass matrices of this size and these strides, and no other thread writes the target.
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
