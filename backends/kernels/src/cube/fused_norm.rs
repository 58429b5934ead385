//! `RMSNorm` together with what comes before it when tokens are decoded: the residual addition, or the joint product of
//! queries, keys and values. Without a gradient.

use super::norm::{
    NormGrid, NormShape, NormShapeLaunch, add_chunks, add_squares, column_of, load_row, normed, reciprocal, step_sums,
    times_of, total_sum,
};
use super::prelude::*;
use crate::shapes::JoinedHeads;

// the kernel adds up however many parts there are
pub(crate) use add_rms_norm as add_rms_norm_parts;

/// See [`crate::add_rms_norm`] and [`crate::add_rms_norm_parts`]: `x` has as many rows as the base, or those of several
/// parts in f32.
pub(crate) fn add_rms_norm(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> [Tensor<2>; 2] {
    let _span = span("norm", 0.0);
    let [base, x, w] = [base, x.clone(), w.clone()].map(detached);
    let [rows, n] = dims(&base);
    let parts = x.shape().num_elements() / (rows * n);
    let normed = empty(&base, [rows, n], base.dtype);
    let (sum, in_place) = reuse_or_alloc(&base);
    let grid = NormGrid::new([&base, &x, &w, &sum, &normed], n);
    let shape = NormShapeLaunch::new(rows, n, eps as f32, offset as f32);
    let (size, cubes, out) = (grid.vector(), grid.rows.cubes([&x], rows), output_arg(&sum, in_place, 0));
    let types = [elem(&normed), elem(&x)];
    launch!(add_normalise, cubes, size, [base, x, w, out, &normed], shape, parts, grid, types);
    [sum, normed].map(Cube::tensor)
}

/// See [`crate::norm_heads`].
pub(crate) fn norm_heads(
    qkv: Tensor<2>,
    [q, k]: [&Tensor<2>; 2],
    heads: JoinedHeads,
    eps: f64,
    offset: f64,
) -> Tensor<2> {
    let _span = span("norm", 0.0);
    let [qkv, q, k] = [qkv, q.clone(), k.clone()].map(detached);
    let out = into_writable(qkv);
    let rows = out.shape()[0];
    let JoinedHeads { queries, keys, dim } = heads;
    let grid = NormGrid::new([&out, &q, &k], dim);
    let shape = NormShapeLaunch::new(rows, dim, eps as f32, offset as f32);
    let (size, cubes) = (grid.vector(), grid.rows.cubes([&out], rows * (queries + keys)));
    launch!(normalise_heads, cubes, size, [&out, q, k], shape, queries, keys, grid, elem(&out));
    Cube::tensor(out)
}

/// The sum of two rows, rounded to their type, and its norm. The second is the sum of `parts` tensors of rows, rounded
/// as well.
#[cube(launch, address_type = "dynamic")]
fn add_normalise<F: Float, X: Float, N: Size>(
    base: &[Vector<F, N>],
    x: &[Vector<X, N>],
    w: &[Vector<F, N>],
    sums: &mut [Vector<F, N>],
    norms: &mut [Vector<F, N>],
    shape: NormShape,
    parts: usize,
    #[comptime] grid: NormGrid,
    #[define(F, X)] _dtypes: [ElemType; 2],
) {
    let mut lanes = row_lanes(comptime!(grid.rows));
    let row = row_index(comptime!(grid.rows));
    let first = row * (shape.n / N::value());
    let is_row = row < shape.rows;
    let mut squares = 0.0f32;
    for before in 0..times_of(shape.n, grid) {
        let bases = load_row::<F, N>(base, first, before, is_row, shape.n, grid);
        let others = load_row::<X, N>(x, first, before, is_row, shape.n, grid);
        let mut own = step_sums(grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let column = column_of(before, load, grid);
            if is_row && column < shape.n {
                let i = first + column / N::value();
                let mut added = Vector::<f32, N>::cast_from(others[load]);
                for part in 1..parts {
                    added += Vector::<f32, N>::cast_from(x[part * shape.rows * (shape.n / N::value()) + i]);
                }
                let added = Vector::<f32, N>::cast_from(Vector::<F, N>::cast_from(added));
                let sum = Vector::<F, N>::cast_from(Vector::<f32, N>::cast_from(bases[load]) + added);
                sums[i] = sum;
                let step = comptime!(grid.step(load));
                own[step] = add_squares::<F, N>(own[step], sum);
            }
        }
        squares = add_chunks(squares, &own, grid);
    }
    let total = total_sum(&mut lanes, squares, grid);
    let r = 1.0f32 / (total / shape.n as f32 + shape.eps).sqrt();
    for before in 0..times_of(shape.n, grid) {
        // each unit reads what it has written itself
        let values = load_row::<F, N>(&*sums, first, before, is_row, shape.n, grid);
        let weights = load_row::<F, N>(w, 0usize, before, true, shape.n, grid);
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let column = column_of(before, load, grid);
            if is_row && column < shape.n {
                let value = normed::<F, N>(values[load], weights[load], r, shape.offset);
                norms[first + column / N::value()] = Vector::<F, N>::cast_from(value);
            }
        }
    }
}

/// The norm of every query head and key head of rows `[queries | keys | values]`, in place.
#[cube(launch, address_type = "dynamic")]
fn normalise_heads<F: Float, N: Size>(
    qkv: &mut [Vector<F, N>],
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    shape: NormShape,
    queries: usize,
    keys: usize,
    #[comptime] grid: NormGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(comptime!(grid.rows));
    let index = row_index(comptime!(grid.rows));
    let head = index % (queries + keys);
    let row = index / (queries + keys);
    let first = (row * (queries + 2 * keys) + head) * (shape.n / N::value());
    let is_row = row < shape.rows;
    let r = reciprocal::<F, N>(&mut lanes, &*qkv, first, is_row, shape.n, shape.eps, grid);
    for before in 0..times_of(shape.n, grid) {
        #[unroll]
        for load in 0..comptime!(grid.loads()) {
            let column = column_of(before, load, grid);
            if is_row && column < shape.n {
                let i = column / N::value();
                let mut weight = q[i];
                if head >= queries {
                    weight = k[i];
                }
                let value = normed::<F, N>(qkv[first + i], weight, r, shape.offset);
                qkv[first + i] = Vector::<F, N>::cast_from(value);
            }
        }
    }
}
