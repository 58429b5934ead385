//! The kernels of paged attention. Whole rows take one: a cube rotates its queries and the new key, writes the new
//! token to the pool, and attends to all columns.
//!
//! For few rows with many columns each row's columns are divided among cubes (split-KV decode attention;
//! Flash-Decoding; Dao, Haziza, Massa and Sizov, 2023). That takes three: rotate queries and append the new token,
//! attend to parts of the columns, combine the parts.

use super::columns::attend_columns;
use super::place::{Layout, Place, Sizes, place_of, slot_of};
use super::source::{Source, load_new, load_queries, rotate_queries};
use super::storage::Storage;
use super::tile::MASKED;
use crate::cube::prelude::*;

/// Attention over whole rows, with a cube for all columns of some query heads.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float, P: Storage, S: Source<F>>(
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
    source: &S,
    pool: &mut P,
    tasks: usize,
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.dim);
    let mut query = Shared::<[f32]>::new_slice(comptime!(sizes.heads * sizes.dim));
    // the new key, then the new value
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * sizes.dim));
    let task = min(CUBE_POS, tasks - 1);
    let (row, chunk) = (task / (layout.chunks * layout.kv), task % layout.chunks);
    let head = task / layout.chunks % layout.kv;
    let place = place_of(table, &layout, row, head, chunk, layout.window, sizes);
    let writes = CUBE_POS < tasks;
    let from = S::offsets(&place, &layout, dim);
    load_queries::<F, S>(source, &*out, angles, &mut query, &place, &from, layout.scale, sizes);
    load_new::<F, S>(source, angles, &mut fresh, &place, &from, dim);
    let scales = P::encode(&mut fresh, dim);
    if writes && chunk < 1 && place.to > 0 {
        let slot = place.base + slot_of(table, &place, place.cached);
        P::write(pool, &fresh, scales, slot, dim);
    }
    let first = place.first;
    attend_columns::<P, F>(&*pool, table, out, &query, &fresh, scales, &place, first, writes, layout.cap, true, sizes);
}

/// Writes rotated queries to the output, and the new token to the pool. A cube has a key head of a row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<F: Float, P: Storage, S: Source<F>>(
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
    source: &S,
    pool: &mut P,
    tasks: usize,
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.dim);
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * sizes.dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = table[layout.rows + task / layout.kv] as usize;
    let place = place_of(table, &layout, row, task % layout.kv, 0usize, 1usize, sizes);
    let from = S::offsets(&place, &layout, dim);
    load_new::<F, S>(source, angles, &mut fresh, &place, &from, dim);
    let scales = P::encode(&mut fresh, dim);
    if CUBE_POS < tasks && place.to > 0 {
        rotate_queries::<F, S>(source, out, angles, &place, &from, layout.group, dim);
        let slot = place.base + slot_of(table, &place, place.cached);
        P::write(pool, &fresh, scales, slot, dim);
    }
}

/// Elements of a part's result: weighted sums of values, each head's maximum, and each head's sum of weights.
pub(super) const fn part_elements(sizes: Sizes) -> usize {
    sizes.heads * (sizes.dim + 2)
}

/// A part of a place's columns, all of which are in the pool.
#[cube]
fn part_of(whole: &Place, part: usize, parts: usize) -> Place {
    let each = (whole.to - whole.from).div_ceil(parts);
    let from = min(whole.from + part * each, whole.to);
    let to = min(from + each, whole.to);
    Place {
        row: whole.row,
        key_head: whole.key_head,
        first: whole.first,
        heads: whole.heads,
        base: whole.base,
        blocks: whole.blocks,
        from,
        to,
        cached: to,
    }
}

/// Copies rotated queries of a place to shared memory, scaled.
#[cube]
fn load_rotated<F: Float>(
    q: &[F],
    query: &mut Shared<[f32]>,
    place: &Place,
    scale: f32,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(heads * dim) {
        let mut x = 0.0f32;
        if i < place.heads * dim {
            x = f32::cast_from(q[place.first + i]) * scale;
        }
        query[i] = x;
        i += UNITS;
    }
    sync_cube();
}

/// Attention over a part of the columns of a row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend_parts<F: Float, P: Storage>(
    q: &[F],
    table: &[i32],
    parted: &mut [f32],
    pool: &P,
    tasks: usize,
    parts: usize,
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut query = Shared::<[f32]>::new_slice(comptime!(sizes.heads * sizes.dim));
    // unused: every column is in the pool
    let fresh = Shared::<[f32]>::new_slice(comptime!(2 * sizes.dim));
    let index = min(CUBE_POS, tasks * parts - 1);
    let task = index / parts;
    let row = table[layout.rows + task / (layout.chunks * layout.kv)] as usize;
    let (head, chunk) = (task / layout.chunks % layout.kv, task % layout.chunks);
    let whole = place_of(table, &layout, row, head, chunk, layout.window, sizes);
    let place = part_of(&whole, index % parts, parts);
    load_rotated::<F>(q, &mut query, &place, layout.scale, comptime!(sizes.heads), comptime!(sizes.dim));
    let first = index * comptime!(part_elements(sizes));
    let writes = CUBE_POS < tasks * parts;
    attend_columns::<P, f32>(
        pool, table, parted, &query, &fresh, 0u32, &place, first, writes, layout.cap, false, sizes,
    );
}

/// Combines the parts of each row, and the sinks of its heads where there are any.
#[cube(launch, address_type = "dynamic")]
pub(super) fn combine_parts<F: Float>(
    parted: &[f32],
    table: &[i32],
    sinks: &[f32],
    out: &mut [F],
    parts: usize,
    layout: Layout,
    #[comptime] sunk: bool,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let (heads, dim) = comptime!((sizes.heads, sizes.dim));
    let each = comptime!(part_elements(sizes));
    let d = ABSOLUTE_POS % dim;
    let head = ABSOLUTE_POS / dim % (layout.kv * layout.group);
    let row = ABSOLUTE_POS / (dim * layout.kv * layout.group);
    if row < layout.rows {
        let mut mean = 0.0f32;
        // a row in no sequence gets zeros
        if table[row] > 0 {
            let index = table[2 * layout.rows + row] as usize;
            let query_head = head % layout.group;
            let task = (index * layout.kv + head / layout.group) * layout.chunks + query_head / heads;
            let first = task * parts * each;
            let scored = first + comptime!(heads * dim) + query_head % heads;
            let mut top = f32::new(MASKED);
            for part in 0..parts {
                top = max(top, parted[scored + part * each]);
            }
            let mut sum = 0.0f32;
            let mut denominator = 0.0f32;
            if sunk {
                top = max(top, sinks[head]);
                denominator = (sinks[head] - top).exp();
            }
            for part in 0..parts {
                let at = part * each;
                let weight = (parted[scored + at] - top).exp();
                sum += weight * parted[first + at + query_head % heads * dim + d];
                denominator += weight * parted[scored + at + heads];
            }
            mean = sum / denominator;
        }
        out[ABSOLUTE_POS] = F::cast_from(mean);
    }
}
