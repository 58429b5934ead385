//! `RMSNorm` together with what comes before it when tokens are decoded: the residual addition, or the joint product of
//! queries, keys and values. Without a gradient.

use super::norm::{NormShape, NormShapeLaunch, reciprocal};
use super::prelude::*;
use crate::shapes::JoinedHeads;

/// See [`crate::add_rms_norm`].
pub(crate) fn add_rms_norm(base: Tensor<2>, x: &Tensor<2>, w: &Tensor<2>, eps: f64, offset: f64) -> [Tensor<2>; 2] {
    let _span = span("norm", 0.0);
    let [base, x, w] = [base, x.clone(), w.clone()].map(detached);
    let [rows, n] = dims(&x);
    let grid = RowGrid::new(n);
    let normed = empty(&x, [rows, n], x.dtype);
    let (sum, in_place) = reuse_or_alloc(&base);
    let shape = NormShapeLaunch::new(rows, n, eps as f32, offset as f32);
    let (cubes, out) = (grid.cubes([&x], rows), output_arg(&sum, in_place, 0));
    launch!(add_normalise, cubes, [base, x, w, out, &normed], shape, grid, elem(&normed));
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
    let grid = RowGrid::new(dim);
    let shape = NormShapeLaunch::new(rows, dim, eps as f32, offset as f32);
    let cubes = grid.cubes([&out], rows * (queries + keys));
    launch!(normalise_heads, cubes, [&out, q, k], shape, queries, keys, grid, elem(&out));
    Cube::tensor(out)
}

/// The sum of two rows, rounded to their type, and its norm.
#[cube(launch, address_type = "dynamic")]
fn add_normalise<F: Float>(
    base: &[F],
    x: &[F],
    w: &[F],
    sums: &mut [F],
    normed: &mut [F],
    shape: NormShape,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(grid);
    let row = row_index(grid);
    let first = row * shape.n;
    let is_row = row < shape.rows;
    let mut squares = 0.0f32;
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let sum = F::cast_from(f32::cast_from(base[first + i]) + f32::cast_from(x[first + i]));
            sums[first + i] = sum;
            let value = f32::cast_from(sum);
            squares += value * value;
            i += comptime!(grid.units);
        }
    }
    let total = row_sum(&mut lanes, squares, comptime!(grid.units));
    if is_row {
        let r = 1.0f32 / (total / shape.n as f32 + shape.eps).sqrt();
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            // each unit reads what it has written itself
            let value = f32::cast_from(sums[first + i]) * r;
            normed[first + i] = F::cast_from(value * (f32::cast_from(w[i]) + shape.offset));
            i += comptime!(grid.units);
        }
    }
}

/// The norm of every query head and key head of rows `[queries | keys | values]`, in place.
#[cube(launch, address_type = "dynamic")]
fn normalise_heads<F: Float>(
    qkv: &mut [F],
    q: &[F],
    k: &[F],
    shape: NormShape,
    queries: usize,
    keys: usize,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = row_lanes(grid);
    let index = row_index(grid);
    let head = index % (queries + keys);
    let row = index / (queries + keys);
    let first = (row * (queries + 2 * keys) + head) * shape.n;
    let is_row = row < shape.rows;
    let r = reciprocal::<F>(&mut lanes, &*qkv, first, is_row, shape.n, shape.eps, comptime!(grid.units));
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < shape.n {
            let mut weight = f32::cast_from(q[i]);
            if head >= queries {
                weight = f32::cast_from(k[i]);
            }
            let value = f32::cast_from(qkv[first + i]) * r;
            qkv[first + i] = F::cast_from(value * (weight + shape.offset));
            i += comptime!(grid.units);
        }
    }
}
