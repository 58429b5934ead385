//! Products of a few queries with rows of keys, and sums of rows of values. A row is loaded once for up to four queries, which share a key
//! head. What is computed of a row does not depend on how rows are divided into runs.

#![allow(
    clippy::needless_range_loop,
    reason = "loops of a constant length over registers, which are unrolled"
)]

use super::vectors::{Stored, Vectors};
use pulp::Simd;
use std::ops::Range;

/// Queries whose sums fit in registers.
const QUERIES: usize = 4;

/// Queries in tiles of even size.
#[inline(always)]
fn tiles(queries: usize) -> impl Iterator<Item = Range<usize>> {
    let count = queries.div_ceil(QUERIES);
    (0..count).map(move |tile| tile * queries / count..(tile + 1) * queries / count)
}

/// The products of queries, `[queries, dim]`, with rows of `dim` numbers: that of query i and row t becomes `out[i * stride + t]`.
#[inline(always)]
pub(super) fn dots<S: Simd, T: Vectors, N: Stored<T>>(
    simd: S,
    queries: &[T],
    dim: usize,
    rows: &[N],
    out: &mut [T],
    stride: usize,
) {
    for tile in tiles(queries.len() / dim) {
        let q = &queries[tile.start * dim..tile.end * dim];
        let out = &mut out[tile.start * stride..];
        match tile.len() {
            4 => dots_of::<S, T, N, 4, 4>(simd, q, dim, rows, out, stride),
            3 => dots_of::<S, T, N, 3, 4>(simd, q, dim, rows, out, stride),
            2 => dots_of::<S, T, N, 2, 4>(simd, q, dim, rows, out, stride),
            _ => dots_of::<S, T, N, 1, 4>(simd, q, dim, rows, out, stride),
        }
    }
}

/// The same of `Q` queries, `R` rows at a time.
#[inline(always)]
fn dots_of<S: Simd, T: Vectors, N: Stored<T>, const Q: usize, const R: usize>(
    simd: S,
    queries: &[T],
    dim: usize,
    rows: &[N],
    out: &mut [T],
    stride: usize,
) {
    let mut blocks = rows.chunks_exact(R * dim);
    let mut token = 0;
    for block in &mut blocks {
        tile::<S, T, N, Q, R>(simd, queries, dim, block, &mut out[token..], stride);
        token += R;
    }
    for row in blocks.remainder().chunks_exact(dim) {
        tile::<S, T, N, Q, 1>(simd, queries, dim, row, &mut out[token..], stride);
        token += 1;
    }
}

/// The products of `Q` queries with `R` rows.
#[inline(always)]
fn tile<S: Simd, T: Vectors, N: Stored<T>, const Q: usize, const R: usize>(
    simd: S,
    queries: &[T],
    dim: usize,
    rows: &[N],
    out: &mut [T],
    stride: usize,
) {
    let enough = queries.len() >= Q * dim && rows.len() >= R * dim;
    assert!(enough && out.len() >= (Q - 1) * stride + R, "a tile");
    let mut sums = [[T::splat(simd, T::ZERO); R]; Q];
    let mut at = 0;
    while at + T::lanes::<S>() <= dim {
        for r in 0..R {
            // SAFETY: there are R rows and Q queries of `dim` numbers, and a vector of them from `at` on.
            #[allow(
                unsafe_code,
                reason = "bounds checks of every vector would cost as much as the products"
            )]
            unsafe {
                let row = N::vector::<S>(rows.as_ptr().add(r * dim + at));
                for q in 0..Q {
                    let query = T::load::<S>(queries.as_ptr().add(q * dim + at));
                    sums[q][r] = T::mul_add(simd, query, row, sums[q][r]);
                }
            }
        }
        at += T::lanes::<S>();
    }
    for q in 0..Q {
        for r in 0..R {
            let mut sum = T::reduce_sum(simd, sums[q][r]);
            for i in at..dim {
                sum += queries[q * dim + i] * rows[r * dim + i].widen();
            }
            out[q * stride + r] = sum;
        }
    }
}

/// Adds rows of `dim` numbers to each of several sums, `[queries, dim]`: row t times `weights[i * stride + t]` to sum i.
#[inline(always)]
pub(super) fn add_weighted<S: Simd, T: Vectors, N: Stored<T>>(
    simd: S,
    weights: &[T],
    stride: usize,
    rows: &[N],
    dim: usize,
    sums: &mut [T],
) {
    for tile in tiles(sums.len() / dim) {
        let sums = &mut sums[tile.start * dim..tile.end * dim];
        let weights = &weights[tile.start * stride..];
        match tile.len() {
            4 => add_to::<S, T, N, 4>(simd, weights, stride, rows, dim, sums),
            3 => add_to::<S, T, N, 3>(simd, weights, stride, rows, dim, sums),
            2 => add_to::<S, T, N, 2>(simd, weights, stride, rows, dim, sums),
            _ => add_to::<S, T, N, 1>(simd, weights, stride, rows, dim, sums),
        }
    }
}

/// The same of `Q` sums.
#[inline(always)]
fn add_to<S: Simd, T: Vectors, N: Stored<T>, const Q: usize>(
    simd: S,
    weights: &[T],
    stride: usize,
    rows: &[N],
    dim: usize,
    sums: &mut [T],
) {
    let lanes = T::lanes::<S>();
    let mut start = 0;
    while start + 4 * lanes <= dim {
        add_columns::<S, T, N, Q, 4>(simd, weights, stride, rows, dim, sums, start);
        start += 4 * lanes;
    }
    while start + 2 * lanes <= dim {
        add_columns::<S, T, N, Q, 2>(simd, weights, stride, rows, dim, sums, start);
        start += 2 * lanes;
    }
    while start + lanes <= dim {
        add_columns::<S, T, N, Q, 1>(simd, weights, stride, rows, dim, sums, start);
        start += lanes;
    }
    for q in 0..Q {
        let sum = &mut sums[q * dim + start..(q + 1) * dim];
        for (row, &weight) in rows.chunks_exact(dim).zip(&weights[q * stride..]) {
            for (sum, &x) in sum.iter_mut().zip(&row[start..]) {
                *sum += weight * x.widen();
            }
        }
    }
}

/// The same of `V` vectors of columns.
#[inline(always)]
fn add_columns<S: Simd, T: Vectors, N: Stored<T>, const Q: usize, const V: usize>(
    simd: S,
    weights: &[T],
    stride: usize,
    rows: &[N],
    dim: usize,
    sums: &mut [T],
    start: usize,
) {
    let (tokens, lanes) = (rows.len() / dim, T::lanes::<S>());
    let enough = sums.len() >= Q * dim && start + V * lanes <= dim;
    assert!(
        enough && weights.len() >= (Q - 1) * stride + tokens,
        "columns of rows"
    );
    let mut own = [[T::splat(simd, T::ZERO); V]; Q];
    // SAFETY: there are Q sums and `tokens` rows of `dim` numbers, as many weights, and V vectors of numbers from `start` on.
    #[allow(
        unsafe_code,
        reason = "bounds checks of every vector would cost as much as the products"
    )]
    unsafe {
        for q in 0..Q {
            for v in 0..V {
                own[q][v] = T::load::<S>(sums.as_ptr().add(q * dim + start + v * lanes));
            }
        }
        for token in 0..tokens {
            let row = rows.as_ptr().add(token * dim + start);
            for v in 0..V {
                let columns = N::vector::<S>(row.add(v * lanes));
                for q in 0..Q {
                    let weight = T::splat(simd, *weights.as_ptr().add(q * stride + token));
                    own[q][v] = T::mul_add(simd, weight, columns, own[q][v]);
                }
            }
        }
        for q in 0..Q {
            for v in 0..V {
                T::store::<S>(
                    sums.as_mut_ptr().add(q * dim + start + v * lanes),
                    own[q][v],
                );
            }
        }
    }
}
