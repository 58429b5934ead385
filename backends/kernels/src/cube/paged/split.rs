//! Split-KV decode attention, for few rows with many columns: each row's columns are divided among cubes
//! (Flash-Decoding; Dao, Haziza, Massa and Sizov, 2023). Three kernels: rotate queries and append the new token, attend
//! to parts of the columns, combine the parts.

use super::super::launch::UNITS;
use super::append::{encode_new, load_new, rotated, write_codes, write_new};
use super::attend::{Place, attend_columns, place_of, slot_of};
use super::joined::separate;
use super::tile::MASKED;
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Elements of a part's result: weighted sums of values, each head's maximum, and each head's sum of weights.
pub(super) const fn numbers(heads: usize, dim: usize) -> usize {
    heads * (dim + 2)
}

/// Rotates the queries of a key head of a row in place.
#[cube]
fn rotate_queries<F: Float>(q: &mut [F], angles: &[f32], place: &Place, group: usize, #[comptime] dim: usize) {
    let half = comptime!(dim / 2);
    let mut i = UNIT_POS as usize;
    while i < group * half {
        let angle = place.row * dim + i % half;
        let at = place.first + i / half * dim + i % half;
        let (a, b) = rotated::<F>(q[at], q[at + half], angles[angle], angles[angle + half]);
        q[at] = F::cast_from(a);
        q[at + half] = F::cast_from(b);
        i += UNITS;
    }
}

/// Rotates queries in place, and writes new keys and values to a pool in a float type. A cube has a key head of a row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<F: Float>(
    q: &mut [F],
    k: &[F],
    v: &[F],
    keys: &mut [F],
    values: &mut [F],
    angles: &[f32],
    table: &[i32],
    tasks: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    slots: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = table[rows + task / kv] as usize;
    let place = place_of(table, row, task, rows, stride, kv, group, 1usize, slots, 1usize, 1usize, dim);
    let new = separate(&place, dim);
    load_new::<F>(k, v, k, angles, &mut fresh, row, &new, false, dim);
    if CUBE_POS < tasks && place.to > 0 {
        rotate_queries::<F>(q, angles, &place, group, dim);
        let slot = place.base + slot_of(table, &place, place.cached);
        write_new::<F>(keys, values, &fresh, slot, dim);
    }
}

/// The same for a pool in 8 bits.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append_int8<F: Float>(
    q: &mut [F],
    k: &[F],
    v: &[F],
    keys: &mut [i32],
    values: &mut [i32],
    scales: &mut [i32],
    angles: &[f32],
    table: &[i32],
    tasks: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    slots: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = table[rows + task / kv] as usize;
    let place = place_of(table, row, task, rows, stride, kv, group, 1usize, slots, 1usize, 1usize, dim);
    let new = separate(&place, dim);
    load_new::<F>(k, v, k, angles, &mut fresh, row, &new, false, dim);
    let fresh_scales = encode_new(&mut fresh, dim);
    if CUBE_POS < tasks && place.to > 0 {
        rotate_queries::<F>(q, angles, &place, group, dim);
        let slot = place.base + slot_of(table, &place, place.cached);
        write_codes(keys, values, scales, &fresh, fresh_scales, slot, dim);
    }
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
        own: whole.own,
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
        if i < place.own * dim {
            x = f32::cast_from(q[place.first + i]) * scale;
        }
        query[i] = x;
        i += UNITS;
    }
    sync_cube();
}

/// Attention over a part of the columns of a row, of a pool in a float type.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float>(
    q: &[F],
    keys: &[F],
    values: &[F],
    table: &[i32],
    out: &mut [f32],
    tasks: usize,
    parts: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    slots: usize,
    window: usize,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut query = Shared::<[f32]>::new_slice(comptime!(heads * dim));
    // unused: every column is in the pool
    let fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let place_in = min(CUBE_POS, tasks * parts - 1);
    let task = place_in / parts;
    let row = table[rows + task / (chunks * kv)] as usize;
    let whole = place_of(table, row, task, rows, stride, kv, group, chunks, slots, window, heads, dim);
    let place = part_of(&whole, place_in % parts, parts);
    load_rotated::<F>(q, &mut query, &place, scale, heads, dim);
    attend_columns::<F, f32>(
        keys,
        values,
        // floats have no scales
        table,
        table,
        out,
        &query,
        &fresh,
        0u32,
        &place,
        place_in * comptime!(numbers(heads, dim)),
        CUBE_POS < tasks * parts,
        cap,
        capped,
        false,
        false,
        heads,
        dim,
    );
}

/// The same of a pool in 8 bits.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend_int8<F: Float>(
    q: &[F],
    keys: &[i32],
    values: &[i32],
    scales: &[i32],
    table: &[i32],
    out: &mut [f32],
    tasks: usize,
    parts: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    slots: usize,
    window: usize,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut query = Shared::<[f32]>::new_slice(comptime!(heads * dim));
    let fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let place_in = min(CUBE_POS, tasks * parts - 1);
    let task = place_in / parts;
    let row = table[rows + task / (chunks * kv)] as usize;
    let whole = place_of(table, row, task, rows, stride, kv, group, chunks, slots, window, heads, dim);
    let place = part_of(&whole, place_in % parts, parts);
    load_rotated::<F>(q, &mut query, &place, scale, heads, dim);
    attend_columns::<i32, f32>(
        keys,
        values,
        scales,
        table,
        out,
        &query,
        &fresh,
        0u32,
        &place,
        place_in * comptime!(numbers(heads, dim)),
        CUBE_POS < tasks * parts,
        cap,
        capped,
        false,
        true,
        heads,
        dim,
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
    rows: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    #[comptime] sunk: bool,
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
        if table[row] > 0 {
            let index = table[2 * rows + row] as usize;
            let own = head % group;
            let task = (index * kv + head / group) * chunks + own / heads;
            let first = task * parts * comptime!(numbers(heads, dim));
            let scored = first + comptime!(heads * dim) + own % heads;
            let mut top = f32::new(MASKED);
            for part in 0..parts {
                top = max(top, parted[scored + part * comptime!(numbers(heads, dim))]);
            }
            let mut sum = 0.0f32;
            let mut all = 0.0f32;
            if sunk {
                top = max(top, sinks[head]);
                all = (sinks[head] - top).exp();
            }
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
