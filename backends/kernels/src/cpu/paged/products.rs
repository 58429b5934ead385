//! Products of a few queries with blocks of keys, and sums of rows of values. A number is loaded once for up to four
//! queries, which share a key head. What is computed of a token does not depend on how blocks are divided into runs.

#![allow(clippy::needless_range_loop, reason = "loops of a constant length over registers, which are unrolled")]

use super::vectors::{Stored, Vectors};
use firebrick_spec::BLOCK_SIZE;
use pulp::Simd;
use std::ops::Range;

/// Queries whose sums fit in registers.
const QUERIES: usize = 4;

/// Sums that fit in registers beside what they are made of.
const SUMS: usize = 8;

/// Queries in tiles of even size.
#[inline(always)]
fn tiles(queries: usize) -> impl Iterator<Item = Range<usize>> {
    let count = queries.div_ceil(QUERIES);
    (0..count).map(move |tile| tile * queries / count..(tile + 1) * queries / count)
}

/// The products of queries, `[queries, dim]`, with the keys of blocks, `[dim, BLOCK_SIZE]` each: that of query i and
/// key t becomes `out[i * stride + t]`.
#[inline(always)]
pub(super) fn dots<S: Simd, T: Vectors, N: Stored<T>>(
    simd: S,
    queries: &[T],
    dim: usize,
    keys: &[N],
    out: &mut [T],
    stride: usize,
) {
    for tile in tiles(queries.len() / dim) {
        let q = &queries[tile.start * dim..tile.end * dim];
        let out = &mut out[tile.start * stride..];
        match tile.len() {
            4 => dots_of::<S, T, N, 4>(simd, q, dim, keys, out, stride),
            3 => dots_of::<S, T, N, 3>(simd, q, dim, keys, out, stride),
            2 => dots_of::<S, T, N, 2>(simd, q, dim, keys, out, stride),
            _ => dots_of::<S, T, N, 1>(simd, q, dim, keys, out, stride),
        }
    }
}

/// [`dots`] of `Q` queries, each product one chain of fused multiply-adds, as in a product of matrices: two blocks at a
/// time where their sums fit in registers.
#[inline(always)]
fn dots_of<S: Simd, T: Vectors, N: Stored<T>, const Q: usize>(
    simd: S,
    queries: &[T],
    dim: usize,
    keys: &[N],
    out: &mut [T],
    stride: usize,
) {
    let block = BLOCK_SIZE * dim;
    let (mut keys, mut token) = (keys, 0);
    if 2 * Q * BLOCK_SIZE <= SUMS * T::lanes::<S>() {
        while keys.len() >= 2 * block {
            tile::<S, T, N, Q, 2>(simd, queries, dim, keys, &mut out[token..], stride);
            (keys, token) = (&keys[2 * block..], token + 2 * BLOCK_SIZE);
        }
    }
    while keys.len() >= block {
        tile::<S, T, N, Q, 1>(simd, queries, dim, keys, &mut out[token..], stride);
        (keys, token) = (&keys[block..], token + BLOCK_SIZE);
    }
}

/// The products of `Q` queries with the keys of `B` blocks.
#[inline(always)]
fn tile<S: Simd, T: Vectors, N: Stored<T>, const Q: usize, const B: usize>(
    simd: S,
    queries: &[T],
    dim: usize,
    keys: &[N],
    out: &mut [T],
    stride: usize,
) {
    let (lanes, block) = (T::lanes::<S>(), BLOCK_SIZE * dim);
    let vectors = BLOCK_SIZE / lanes;
    let enough = queries.len() >= Q * dim && keys.len() >= B * block;
    assert!(enough && out.len() >= (Q - 1) * stride + B * BLOCK_SIZE, "a tile");
    // as many vectors of a block as there are where one has a single number
    let mut sums = [[[T::splat(simd, T::ZERO); BLOCK_SIZE]; B]; Q];
    // SAFETY: there are Q queries of `dim` numbers and B blocks of `dim` rows, each of `vectors` vectors, and as many
    // products.
    unsafe {
        for at in 0..dim {
            for b in 0..B {
                for v in 0..vectors {
                    let row = b * block + at * BLOCK_SIZE;
                    let keys = N::vector::<S>(keys.as_ptr().add(row + v * lanes));
                    for q in 0..Q {
                        let query = T::splat(simd, *queries.as_ptr().add(q * dim + at));
                        sums[q][b][v] = T::mul_add(simd, query, keys, sums[q][b][v]);
                    }
                }
            }
        }
        for q in 0..Q {
            for b in 0..B {
                for v in 0..vectors {
                    let to = q * stride + b * BLOCK_SIZE + v * lanes;
                    T::store::<S>(out.as_mut_ptr().add(to), sums[q][b][v]);
                }
            }
        }
    }
}

/// Adds rows of `dim` numbers to each of several sums, `[queries, dim]`: row t times `weights[i * stride + t]` to sum
/// i.
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

/// [`add_weighted`] to `Q` sums.
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
                *sum = weight.fma(x.widen(), *sum);
            }
        }
    }
}

/// [`add_to`] of `V` vectors of columns.
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
    assert!(enough && weights.len() >= (Q - 1) * stride + tokens, "columns of rows");
    let mut totals = [[T::splat(simd, T::ZERO); V]; Q];
    // SAFETY: there are Q sums and `tokens` rows of `dim` numbers, as many weights, and V vectors of numbers from
    // `start` on.
    unsafe {
        for q in 0..Q {
            for v in 0..V {
                totals[q][v] = T::load::<S>(sums.as_ptr().add(q * dim + start + v * lanes));
            }
        }
        for token in 0..tokens {
            let row = rows.as_ptr().add(token * dim + start);
            for v in 0..V {
                let columns = N::vector::<S>(row.add(v * lanes));
                for q in 0..Q {
                    let weight = T::splat(simd, *weights.as_ptr().add(q * stride + token));
                    totals[q][v] = T::mul_add(simd, weight, columns, totals[q][v]);
                }
            }
        }
        for q in 0..Q {
            for v in 0..V {
                T::store::<S>(sums.as_mut_ptr().add(q * dim + start + v * lanes), totals[q][v]);
            }
        }
    }
}
