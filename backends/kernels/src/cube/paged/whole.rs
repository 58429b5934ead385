//! Attention over whole rows, with a cube for all columns of some query heads; the output replaces the queries.

use super::append::{encode_new, load_new, write_codes, write_new};
use super::attend::{attend_columns, load_queries, place_of, slot_of};
use super::joined::separate;
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Over a pool in a float type.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float>(
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
    // the new key, then the new value
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = task / (chunks * kv);
    let place = place_of(table, row, task, rows, stride, kv, group, chunks, slots, window, heads, dim);
    let writes = CUBE_POS < tasks;
    // there is no bias
    load_queries::<F>(&*q, k, angles, &mut query, &place, place.first, 0usize, scale, false, heads, dim);
    let new = separate(&place, dim);
    load_new::<F>(k, v, k, angles, &mut fresh, row, &new, false, dim);
    if writes && task % chunks < 1 && place.to > 0 {
        let slot = place.base + slot_of(table, &place, place.cached);
        write_new::<F>(keys, values, &fresh, slot, dim);
    }
    attend_columns::<F, F>(
        &*keys,
        &*values,
        // floats have no scales
        table,
        table,
        q,
        &query,
        &fresh,
        0u32,
        &place,
        place.first,
        writes,
        cap,
        capped,
        true,
        false,
        heads,
        dim,
    );
}

/// Over a pool in 8 bits.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend_int8<F: Float>(
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
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = task / (chunks * kv);
    let place = place_of(table, row, task, rows, stride, kv, group, chunks, slots, window, heads, dim);
    let writes = CUBE_POS < tasks;
    // there is no bias
    load_queries::<F>(&*q, k, angles, &mut query, &place, place.first, 0usize, scale, false, heads, dim);
    let new = separate(&place, dim);
    load_new::<F>(k, v, k, angles, &mut fresh, row, &new, false, dim);
    let fresh_scales = encode_new(&mut fresh, dim);
    if writes && task % chunks < 1 && place.to > 0 {
        let slot = place.base + slot_of(table, &place, place.cached);
        write_codes(keys, values, scales, &fresh, fresh_scales, slot, dim);
    }
    attend_columns::<i32, F>(
        &*keys,
        &*values,
        &*scales,
        table,
        q,
        &query,
        &fresh,
        fresh_scales,
        &place,
        place.first,
        writes,
        cap,
        capped,
        true,
        true,
        heads,
        dim,
    );
}
