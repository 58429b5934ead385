//! Split-KV decode attention, for few rows with many columns: each row's columns are divided among cubes (Flash-Decoding; Dao, Haziza,
//! Massa and Sizov, 2023). Three kernels: rotate queries and append the new column, attend to parts of the columns, combine the
//! parts.

use super::super::launch::UNITS;
use super::attend::{Place, attend_columns, place_of, rotated};
use super::tile::MASKED;
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Elements of a part's result: weighted sums of values, each head's maximum, and each head's sum of weights.
pub(super) const fn numbers(heads: usize, dim: usize) -> usize {
    heads * (dim + 2)
}

/// Rotates queries in place and new keys on their way to the cache; copies new values there too.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append_kv<F: Float>(
    q: &mut [F],
    k: &[F],
    v: &[F],
    keys: &mut [F],
    values: &mut [F],
    cos: &[f32],
    sin: &[f32],
    live: &[i32],
    rows: usize,
    kv: usize,
    group: usize,
    columns: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let half = comptime!(dim / 2);
    let heads = kv * group;
    // a unit has a pair of elements: of a query head, a key head, or a value head
    let pair = ABSOLUTE_POS % half;
    let head = ABSOLUTE_POS / half % (heads + 2 * kv);
    let row = ABSOLUTE_POS / (half * (heads + 2 * kv));
    if row < rows {
        let angle = row * half + pair;
        let to = live[row * 2 + 1] as usize;
        let lives = to > live[row * 2] as usize;
        if head < heads {
            let at = (row * heads + head) * dim + pair;
            let (a, b) = rotated::<F>(q[at], q[at + half], cos[angle], sin[angle]);
            q[at] = F::cast_from(a);
            q[at + half] = F::cast_from(b);
        } else if lives {
            let head = (head - heads) % kv;
            let from = (row * kv + head) * dim + pair;
            let at = ((row * kv + head) * columns + to - 1) * dim + pair;
            if ABSOLUTE_POS / half % (heads + 2 * kv) < heads + kv {
                let (a, b) = rotated::<F>(k[from], k[from + half], cos[angle], sin[angle]);
                keys[at] = F::cast_from(a);
                keys[at + half] = F::cast_from(b);
            } else {
                values[at] = v[from];
                values[at + half] = v[from + half];
            }
        }
    }
}

/// Attention over a part of the columns of a live row. After each row's first and last column, `live` lists the live rows.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float>(
    q: &[F],
    keys: &[F],
    values: &[F],
    live: &[i32],
    out: &mut [f32],
    tasks: usize,
    parts: usize,
    rows: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    columns: usize,
    window: usize,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut query = Shared::<[f32]>::new_slice(comptime!(heads * dim));
    // unused: every column is in the cache
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let place_in = min(CUBE_POS, tasks * parts - 1);
    let task = place_in / parts;
    let row = live[2 * rows + task / (chunks * kv)] as usize;
    let whole = place_of(
        live, row, task, kv, group, chunks, columns, window, heads, dim,
    );
    let each = (whole.to - whole.from).div_ceil(parts);
    let from = min(whole.from + place_in % parts * each, whole.to);
    let to = min(from + each, whole.to);
    let place = Place {
        row,
        key_head: whole.key_head,
        first: whole.first,
        own: whole.own,
        base: whole.base,
        from,
        to,
        cached: to,
    };
    let mut i = UNIT_POS as usize;
    while i < comptime!(heads * dim) {
        let mut x = 0.0f32;
        if i < place.own * dim {
            x = f32::cast_from(q[place.first + i]) * scale;
        }
        query[i] = x;
        i += UNITS;
    }
    sync_cube();
    let first = place_in * comptime!(numbers(heads, dim));
    let writes = CUBE_POS < tasks * parts;
    attend_columns::<F, f32>(
        keys, values, out, &mut query, &mut fresh, &place, first, writes, cap, capped, false,
        heads, dim,
    );
}

/// Combines the parts of each row. After the live rows, `live` has each row's index among them.
#[cube(launch, address_type = "dynamic")]
pub(super) fn combine_parts<F: Float>(
    parted: &[f32],
    live: &[i32],
    out: &mut [F],
    parts: usize,
    rows: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let d = ABSOLUTE_POS % dim;
    let head = ABSOLUTE_POS / dim % (kv * group);
    let row = ABSOLUTE_POS / (dim * kv * group);
    if row < rows {
        let mut mean = 0.0f32;
        // a row in no sequence gets zeros
        if live[row * 2 + 1] > live[row * 2] {
            let lives = live[3 * rows + row] as usize;
            let own = head % group;
            let task = (lives * kv + head / group) * chunks + own / heads;
            let first = task * parts * comptime!(numbers(heads, dim));
            let scored = first + comptime!(heads * dim) + own % heads;
            let mut top = f32::new(MASKED);
            for part in 0..parts {
                top = max(top, parted[scored + part * comptime!(numbers(heads, dim))]);
            }
            let mut sum = 0.0f32;
            let mut all = 0.0f32;
            for part in 0..parts {
                let at = part * comptime!(numbers(heads, dim));
                let weight = (parted[scored + at] - top).exp();
                sum += weight * parted[first + at + own % heads * dim + d];
                all += weight * parted[scored + at + heads];
            }
            mean = sum / all;
        }
        out[ABSOLUTE_POS] = F::cast_from(mean);
    }
}
