//! Matrix products through the `gemm` crate, on strided matrices, in an order of additions that depends on the number
//! of inputs alone.
//!
//! The inputs are divided into [parts](input_parts). A part's products are one chain of fused multiply-adds from zero,
//! input by input, and sums of parts are added in their order. So a row's product has the same bits whatever rows are
//! multiplied with it, and the same as in [panels](super::packed). The `gemm` crate keeps a chain for parts of up to 512
//! inputs, but adds in other orders where a result is a vector, which is computed here, or small and of columns by
//! columns, for which one of them is copied into rows.

use super::parallel::vectorised;
use super::real::Real;
use gemm::Parallelism;
use std::ops::Range;

/// Most inputs of a part: the `gemm` crate divides no fewer.
const PART: usize = 512;

/// Numbers of a result up to which the `gemm` crate may divide a chain among the lanes of a vector.
const SMALL: usize = 256;

/// Inputs in parts of one length, the last of them maybe shorter.
#[inline]
pub(super) fn input_parts(inputs: usize) -> impl Iterator<Item = Range<usize>> {
    let length = inputs.div_ceil(inputs.div_ceil(PART).max(1)).max(1);
    (0..inputs).step_by(length).map(move |start| start..(start + length).min(inputs))
}

/// [`multiply`] or [`multiply_in_any_order`].
pub(super) type Multiply<T> = fn(Size, Target<T>, Matrix<T>, Matrix<T>, Parallelism);

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
    if size.k == 0 {
        return multiply_part(size, out, a, b, parallelism);
    }
    for part in input_parts(size.k) {
        let out = Target { add: out.add || part.start > 0, ..out };
        multiply_part(Size { k: part.len(), ..size }, out, a.part(0, part.start), b.part(part.start, 0), parallelism);
    }
}

/// [`multiply`] with one chain.
fn multiply_part<T: Real>(size: Size, out: Target<T>, a: Matrix<T>, b: Matrix<T>, parallelism: Parallelism) {
    let Size { m, k, n } = size;
    // the crate rounds products of two inputs before it adds them
    if m == 1 || n == 1 || k <= 2 {
        let out = Cells { start: out.start, row: out.row, column: 1, add: out.add };
        // SAFETY: the caller's promise.
        return vectorised!(unsafe {
            if m > n {
                chains(Size { m: n, k, n: m }, out.transposed(), b.transposed(), a.transposed());
            } else {
                chains(size, out, a, b);
            }
        });
    }
    let mut rows = Vec::new();
    let b = if m * n <= SMALL && a.column == 1 && b.row == 1 {
        rows.reserve_exact(k * n);
        // SAFETY: the caller's promise.
        rows.extend((0..k).flat_map(|row| (0..n).map(move |column| unsafe { *b.part(row, column).start })));
        Matrix::row_major(&rows, n)
    } else {
        b
    };
    multiply_in_any_order(size, out, a, b, parallelism);
}

/// [`multiply`] in the order of additions of the `gemm` crate: for results that no sampler computes too, such as gradients.
pub(super) fn multiply_in_any_order<T: Real>(
    size: Size,
    out: Target<T>,
    a: Matrix<T>,
    b: Matrix<T>,
    parallelism: Parallelism,
) {
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

/// A [`Target`] with any strides.
#[derive(Clone, Copy)]
struct Cells<T> {
    start: *mut T,
    row: usize,
    column: usize,
    add: bool,
}

impl<T> Cells<T> {
    fn transposed(self) -> Self {
        Self { row: self.column, column: self.row, ..self }
    }
}

/// A product whose chains are in registers, side by side: along rows of `b`, which are vectors where its columns are
/// neighbours.
///
/// # Safety
/// The matrices must have this size and these strides, and no other thread may write the target.
#[inline(always)]
unsafe fn chains<T: Real>(Size { m, k, n }: Size, out: Cells<T>, a: Matrix<T>, b: Matrix<T>) {
    let size = Size { m, k, n };
    // SAFETY: the caller's promise.
    unsafe {
        if b.column == 1 {
            let whole = n - n % 64;
            side_by_side::<T, 64>(size, 0..whole, out, a, Matrix { column: 1, ..b });
            side_by_side::<T, 8>(size, whole..n, out, a, Matrix { column: 1, ..b });
        } else {
            side_by_side::<T, 8>(size, 0..n, out, a, b);
        }
    }
}

/// Some columns of [`chains`], `W` at a time.
///
/// # Safety
/// As of [`chains`].
#[inline(always)]
unsafe fn side_by_side<T: Real, const W: usize>(
    Size { m, k, .. }: Size,
    columns: Range<usize>,
    out: Cells<T>,
    a: Matrix<T>,
    b: Matrix<T>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..m {
            let left = a.start.add(row * a.row);
            for first in columns.clone().step_by(W) {
                let width = W.min(columns.end - first);
                let b_start = b.start.add(first * b.column);
                let mut sums = [T::ZERO; W];
                for i in 0..k {
                    let (x, b_row) = (*left.add(i * a.column), b_start.add(i * b.row));
                    if width == W {
                        for (column, sum) in sums.iter_mut().enumerate() {
                            *sum = x.fma(*b_row.add(column * b.column), *sum);
                        }
                    } else {
                        for (column, sum) in sums[..width].iter_mut().enumerate() {
                            *sum = x.fma(*b_row.add(column * b.column), *sum);
                        }
                    }
                }
                for (column, &sum) in sums[..width].iter().enumerate() {
                    let to = out.start.add(row * out.row + (first + column) * out.column);
                    to.write(if out.add { *to + sum } else { sum });
                }
            }
        }
    }
}
