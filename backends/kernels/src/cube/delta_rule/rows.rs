//! Gradients of the inputs, row by row: through the norms of queries and keys, and of values, β and g.

use super::sizes::Sizes;
use super::tile::{HeadPlace, RuleLayout, inverse_norm, place_of};
use crate::cube::prelude::*;
use crate::delta::CHUNK_FIELDS;

/// The sum over the value heads of a key head of an element of their gradients.
#[cube]
fn of_group(d_qk: &[f32], first: usize, group: usize, i: usize, #[comptime] dim: usize) -> f32 {
    let mut sum = 0.0f32;
    for head in 0..group {
        sum += d_qk[first + head * comptime!(2 * dim) + i];
    }
    sum
}

/// Writes the gradient of a query or key before it was divided by its norm and multiplied by `scale`.
#[cube]
fn through_norm<F: Float>(
    qkv: &[F],
    d_qk: &[f32],
    d_qkv: &mut [F],
    lanes: &mut Shared<[f32]>,
    at: usize,
    first: usize,
    group: usize,
    scale: f32,
    is_row: bool,
    #[comptime] dim: usize,
    #[comptime] units: usize,
) {
    let mut squares = 0.0f32;
    let mut along = 0.0f32;
    let mut i = UNIT_POS_X as usize;
    while i < dim {
        let x = f32::cast_from(qkv[at + i]);
        squares += x * x;
        along += x * of_group(d_qk, first, group, i, dim);
        i += units;
    }
    let r = inverse_norm(row_sum(lanes, squares, units));
    let along = row_sum(lanes, along, units) * r * r;
    if is_row {
        let mut i = UNIT_POS_X as usize;
        while i < dim {
            let x = f32::cast_from(qkv[at + i]);
            let d = of_group(d_qk, first, group, i, dim);
            d_qkv[at + i] = F::cast_from(scale * r * (d - x * along));
            i += units;
        }
    }
}

/// Of a value head of a row, the `token_head`-th of all: dV, and the sums `dq · q − dV · v` and dβ.
#[cube]
fn of_values<F: Float>(
    qkv: &[F],
    d_qk: &[f32],
    vectors: &[f32],
    d_qkv: &mut [F],
    lanes: &mut Shared<[f32]>,
    place: &HeadPlace,
    layout: &RuleLayout,
    row: usize,
    token_head: usize,
    beta: f32,
    is_row: bool,
    #[comptime] sizes: Sizes,
    #[comptime] units: usize,
) -> (f32, f32) {
    let dim = comptime!(sizes.key_dim);
    let width = comptime!(sizes.value_dim);
    let first = row * place.channels;
    let mut squares = 0.0f32;
    let mut of_query = 0.0f32;
    let mut i = UNIT_POS_X as usize;
    while i < dim {
        let q = f32::cast_from(qkv[first + place.query + i]);
        squares += q * q;
        of_query += q * d_qk[token_head * comptime!(2 * dim) + i];
        i += units;
    }
    let mut of_value = 0.0f32;
    let mut of_beta = 0.0f32;
    let mut j = UNIT_POS_X as usize;
    while j < width {
        let d_delta = vectors[layout.vectors_at + token_head * width + j];
        let at = first + place.value + j;
        of_value += beta * d_delta * f32::cast_from(qkv[at]);
        of_beta += d_delta * vectors[token_head * width + j];
        if is_row {
            d_qkv[at] = F::cast_from(beta * d_delta);
        }
        j += units;
    }
    let r = inverse_norm(row_sum(lanes, squares, units)) * layout.scale;
    let of_query = row_sum(lanes, of_query, units) * r;
    let of_value = row_sum(lanes, of_value, units);
    (of_query - of_value, row_sum(lanes, of_beta, units))
}

/// Gradients of queries, keys and values, and of β; of g what each token adds. Some units have a key head of a row,
/// with its value heads.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn delta_rule_rows<F: Float>(
    qkv: &[F],
    beta: &[f32],
    vectors: &[f32],
    d_qk: &[f32],
    table: &[i32],
    d_qkv: &mut [F],
    d_g: &mut [f32],
    d_beta: &mut [f32],
    layout: RuleLayout,
    #[comptime] grid: RowGrid,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.key_dim);
    let units = comptime!(grid.units);
    let mut lanes = row_lanes(grid);
    let index = row_index(grid);
    let is_row = index < layout.tasks;
    let task = min(index, layout.tasks - 1);
    let row = table[layout.rows_at + task / layout.keys] as usize;
    let group = layout.values / layout.keys;
    let head = task % layout.keys * group;
    for i in 0..group {
        let token_head = row * layout.values + head + i;
        let place = place_of(&layout, head + i, sizes);
        let (of_g, of_beta) = of_values::<F>(
            qkv,
            d_qk,
            vectors,
            d_qkv,
            &mut lanes,
            &place,
            &layout,
            row,
            token_head,
            beta[token_head],
            is_row,
            sizes,
            units,
        );
        if is_row && UNIT_POS_X == 0 {
            d_g[token_head] = of_g;
            d_beta[token_head] = of_beta;
        }
    }
    let place = place_of(&layout, head, sizes);
    let query = row * place.channels + place.query;
    let key = row * place.channels + place.key;
    let first = (row * layout.values + head) * comptime!(2 * dim);
    through_norm::<F>(qkv, d_qk, d_qkv, &mut lanes, query, first, group, layout.scale, is_row, dim, units);
    through_norm::<F>(qkv, d_qk, d_qkv, &mut lanes, key, first + dim, group, 1.0f32, is_row, dim, units);
}

/// The gradient of g: in a chunk of a value head the sum of what tokens from each on add, and of the products after the
/// chunk.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn delta_rule_decays(d_qk: &[f32], table: &[i32], d_g: &mut [f32], layout: RuleLayout) {
    let task = ABSOLUTE_POS;
    if task < layout.tasks {
        let at = layout.chunks_at + task / layout.values * CHUNK_FIELDS;
        let start = table[at] as usize;
        let end = table[at + 1] as usize;
        let head = task % layout.values;
        let mut sum = d_qk[layout.products_at + task];
        for done in 0..end - start {
            let token_head = (end - 1 - done) * layout.values + head;
            sum += d_g[token_head];
            d_g[token_head] = sum;
        }
    }
}
