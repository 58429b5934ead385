//! Products of a chunk's matrices, on one thread. Those of triangular matrices leave blocks of zeros out.

use crate::cpu::prelude::*;

/// Rows and columns of a triangular matrix's blocks.
const BLOCK: usize = 32;

/// `out = a · b`, or `out += a · b`.
pub(super) fn product<T: Real>([m, k, n]: [usize; 3], out: Target<T>, a: Matrix<T>, b: Matrix<T>) {
    multiply_in_any_order(Size { m, k, n }, out, a, b, Parallelism::None);
}

/// Columns of a row of an `[m, m]` triangular matrix that its products read and write: up to the end of the block on
/// the diagonal.
pub(super) fn columns(row: usize, m: usize) -> usize {
    ((row / BLOCK + 1) * BLOCK).min(m)
}

/// Blocks of rows.
fn blocks(m: usize) -> impl Iterator<Item = [usize; 2]> {
    let starts = (0..m).step_by(BLOCK);
    starts.map(move |start| [start, columns(start, m)])
}

/// The lower blocks, with those on the diagonal, of the `[m, m]` product of `a`, `[m, k]`, and `b`, `[k, m]`.
pub(super) fn lower_of<T: Real>([m, k]: [usize; 2], out: Target<T>, a: Matrix<T>, b: Matrix<T>) {
    for [start, end] in blocks(m) {
        product([end - start, k, end], out.part(start), a.part(start, 0), b);
    }
}

/// The product of a lower triangular matrix, `[m, m]`, and `x`, `[m, n]`.
pub(super) fn lower_times<T: Real>([m, n]: [usize; 2], out: Target<T>, lower: Matrix<T>, x: Matrix<T>) {
    for [start, end] in blocks(m) {
        let lower = lower.part(start, 0);
        product([end - start, end, n], out.part(start), lower, x);
    }
}

/// The product of a lower triangular matrix, `[m, m]`, transposed, and `x`, `[m, n]`.
pub(super) fn lower_transposed_times<T: Real>([m, n]: [usize; 2], out: Target<T>, lower: Matrix<T>, x: Matrix<T>) {
    for [start, end] in blocks(m) {
        let upper = lower.part(start, start).transposed();
        let x = x.part(start, 0);
        product([end - start, m - start, n], out.part(start), upper, x);
    }
}
