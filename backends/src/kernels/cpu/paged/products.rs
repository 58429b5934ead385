//! Products of a few queries with rows of keys, and sums of rows of values. A row is loaded once for up to four queries, which share a key
//! head.

use super::storage::Stored;
use crate::kernels::cpu::real::{LANES, Real, reduce_lanes};
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
pub(super) fn dots<T: Real, N: Stored<T>>(
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
            4 => dots_of::<T, N, 4, 2>(q, dim, rows, out, stride),
            3 => dots_of::<T, N, 3, 2>(q, dim, rows, out, stride),
            2 => dots_of::<T, N, 2, 4>(q, dim, rows, out, stride),
            _ => dots_of::<T, N, 1, 4>(q, dim, rows, out, stride),
        }
    }
}

/// The same of `Q` queries, `R` rows at a time.
#[inline(always)]
fn dots_of<T: Real, N: Stored<T>, const Q: usize, const R: usize>(
    queries: &[T],
    dim: usize,
    rows: &[N],
    out: &mut [T],
    stride: usize,
) {
    let mut blocks = rows.chunks_exact(R * dim);
    let mut token = 0;
    for block in &mut blocks {
        let sums = tile::<T, N, Q, R>(queries, dim, block);
        for (i, sums) in sums.iter().enumerate() {
            out[i * stride + token..][..R].copy_from_slice(sums);
        }
        token += R;
    }
    for row in blocks.remainder().chunks_exact(dim) {
        let sums = tile::<T, N, Q, 1>(queries, dim, row);
        for (i, [sum]) in sums.into_iter().enumerate() {
            out[i * stride + token] = sum;
        }
        token += 1;
    }
}

/// The products of `Q` queries with `R` rows. Each is summed in the same order whatever `Q` and `R` are.
#[inline(always)]
fn tile<T: Real, N: Stored<T>, const Q: usize, const R: usize>(
    queries: &[T],
    dim: usize,
    rows: &[N],
) -> [[T; R]; Q] {
    assert!(
        queries.len() >= Q * dim && rows.len() >= R * dim,
        "rows of a tile"
    );
    let whole = dim - dim % LANES;
    let mut lanes = [[[T::ZERO; LANES]; R]; Q];
    for start in (0..whole).step_by(LANES) {
        for r in 0..R {
            let row: [T; LANES] = widened(&rows[r * dim + start..]);
            for q in 0..Q {
                let query = &queries[q * dim + start..][..LANES];
                for lane in 0..LANES {
                    lanes[q][r][lane] += query[lane] * row[lane];
                }
            }
        }
    }
    let mut sums = [[T::ZERO; R]; Q];
    for q in 0..Q {
        for r in 0..R {
            let rest = (whole..dim).map(|at| queries[q * dim + at] * rows[r * dim + at].widen());
            sums[q][r] = reduce_lanes(lanes[q][r]) + rest.sum::<T>();
        }
    }
    sums
}

/// Adds rows of `dim` numbers to each of several sums, `[queries, dim]`: row t times `weights[i * stride + t]` to sum i.
#[inline(always)]
pub(super) fn add_weighted<T: Real, N: Stored<T>>(
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
            4 => add_to::<T, N, 4>(weights, stride, rows, dim, sums),
            3 => add_to::<T, N, 3>(weights, stride, rows, dim, sums),
            2 => add_to::<T, N, 2>(weights, stride, rows, dim, sums),
            _ => add_to::<T, N, 1>(weights, stride, rows, dim, sums),
        }
    }
}

/// The same of `Q` sums.
#[inline(always)]
fn add_to<T: Real, N: Stored<T>, const Q: usize>(
    weights: &[T],
    stride: usize,
    rows: &[N],
    dim: usize,
    sums: &mut [T],
) {
    let mut start = 0;
    while start + 2 * LANES <= dim {
        add_columns::<T, N, Q, 2>(weights, stride, rows, dim, sums, start);
        start += 2 * LANES;
    }
    if start + LANES <= dim {
        add_columns::<T, N, Q, 1>(weights, stride, rows, dim, sums, start);
        start += LANES;
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

/// The same of `V` vectors of columns. Sums of tokens are in their order, so that it does not matter how tokens are divided into runs.
#[inline(always)]
fn add_columns<T: Real, N: Stored<T>, const Q: usize, const V: usize>(
    weights: &[T],
    stride: usize,
    rows: &[N],
    dim: usize,
    sums: &mut [T],
    start: usize,
) {
    let tokens = rows.len() / dim;
    let weights: [&[T]; Q] = std::array::from_fn(|q| &weights[q * stride..][..tokens]);
    let mut own: [[[T; LANES]; V]; Q] = std::array::from_fn(|q| {
        std::array::from_fn(|v| widened(&sums[q * dim + start + v * LANES..]))
    });
    for (token, row) in rows.chunks_exact(dim).enumerate() {
        let row: [[T; LANES]; V] = std::array::from_fn(|v| widened(&row[start + v * LANES..]));
        for q in 0..Q {
            let weight = weights[q][token];
            for v in 0..V {
                for lane in 0..LANES {
                    own[q][v][lane] += weight * row[v][lane];
                }
            }
        }
    }
    for q in 0..Q {
        for v in 0..V {
            sums[q * dim + start + v * LANES..][..LANES].copy_from_slice(&own[q][v]);
        }
    }
}

/// A vector of numbers.
#[inline(always)]
fn widened<T: Real, N: Stored<T>>(numbers: &[N]) -> [T; LANES] {
    let numbers = &numbers[..LANES];
    std::array::from_fn(|lane| numbers[lane].widen())
}
