//! The same kernels for new tokens whose query, key and value are neighbours, `[queries | keys | values]`, as one
//! product made them, with their biases still to be added. The output has a buffer of its own.

use super::super::launch::UNITS;
use super::append::{NewToken, element, encode_new, load_new, rotated, write_codes, write_new};
use super::attend::{Place, attend_columns, load_queries, place_of, slot_of};
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// The new key and value of a place in tensors of their own, without biases.
#[cube]
pub(super) fn separate(place: &Place, #[comptime] dim: usize) -> NewToken {
    NewToken { key: place.key_head * dim, value: place.key_head * dim, key_bias: 0usize, value_bias: 0usize }
}

/// The new key and value of a place in joined rows.
#[cube]
fn joined(place: &Place, kv: usize, group: usize, #[comptime] dim: usize) -> NewToken {
    let start = place.row * (group + 2) * kv * dim;
    let key = (kv * group + place.key_head - place.row * kv) * dim;
    let value = key + kv * dim;
    NewToken { key: start + key, value: start + value, key_bias: key, value_bias: value }
}

/// Over a pool in a float type, with a cube for all columns of some query heads.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float>(
    qkv: &[F],
    bias: &[F],
    keys: &mut [F],
    values: &mut [F],
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
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
    #[comptime] biased: bool,
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
    // in the joined rows, a row's queries are followed by its keys and values
    let first = place.first + row * 2 * kv * dim;
    let first_bias = place.first - row * kv * group * dim;
    load_queries::<F>(qkv, bias, angles, &mut query, &place, first, first_bias, scale, biased, heads, dim);
    let new = joined(&place, kv, group, dim);
    load_new::<F>(qkv, qkv, bias, angles, &mut fresh, row, &new, biased, dim);
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
        out,
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
    qkv: &[F],
    bias: &[F],
    keys: &mut [i32],
    values: &mut [i32],
    scales: &mut [i32],
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
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
    #[comptime] biased: bool,
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
    let first = place.first + row * 2 * kv * dim;
    let first_bias = place.first - row * kv * group * dim;
    load_queries::<F>(qkv, bias, angles, &mut query, &place, first, first_bias, scale, biased, heads, dim);
    let new = joined(&place, kv, group, dim);
    load_new::<F>(qkv, qkv, bias, angles, &mut fresh, row, &new, biased, dim);
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
        out,
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

/// Writes the rotated queries of a key head of a row.
#[cube]
fn rotate_queries<F: Float>(
    qkv: &[F],
    bias: &[F],
    angles: &[f32],
    out: &mut [F],
    place: &Place,
    kv: usize,
    group: usize,
    #[comptime] biased: bool,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let first = place.first + place.row * 2 * kv * dim;
    let first_bias = place.first - place.row * kv * group * dim;
    let mut i = UNIT_POS as usize;
    while i < group * half {
        let angle = place.row * dim + i % half;
        let own = i / half * dim + i % half;
        let x = element::<F>(qkv, bias, first + own, first_bias + own, biased);
        let y = element::<F>(qkv, bias, first + own + half, first_bias + own + half, biased);
        let (a, b) = rotated::<F>(x, y, angles[angle], angles[angle + half]);
        out[place.first + own] = F::cast_from(a);
        out[place.first + own + half] = F::cast_from(b);
        i += UNITS;
    }
}

/// Writes rotated queries to the output, and new keys and values to a pool in a float type. A cube has a key head of a
/// row.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append<F: Float>(
    qkv: &[F],
    bias: &[F],
    keys: &mut [F],
    values: &mut [F],
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
    tasks: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    slots: usize,
    #[comptime] biased: bool,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = table[rows + task / kv] as usize;
    let place = place_of(table, row, task, rows, stride, kv, group, 1usize, slots, 1usize, 1usize, dim);
    let new = joined(&place, kv, group, dim);
    load_new::<F>(qkv, qkv, bias, angles, &mut fresh, row, &new, biased, dim);
    if CUBE_POS < tasks && place.to > 0 {
        rotate_queries::<F>(qkv, bias, angles, out, &place, kv, group, biased, dim);
        let slot = place.base + slot_of(table, &place, place.cached);
        write_new::<F>(keys, values, &fresh, slot, dim);
    }
}

/// The same for a pool in 8 bits.
#[cube(launch, address_type = "dynamic")]
pub(super) fn append_int8<F: Float>(
    qkv: &[F],
    bias: &[F],
    keys: &mut [i32],
    values: &mut [i32],
    scales: &mut [i32],
    angles: &[f32],
    table: &[i32],
    out: &mut [F],
    tasks: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    slots: usize,
    #[comptime] biased: bool,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = table[rows + task / kv] as usize;
    let place = place_of(table, row, task, rows, stride, kv, group, 1usize, slots, 1usize, 1usize, dim);
    let new = joined(&place, kv, group, dim);
    load_new::<F>(qkv, qkv, bias, angles, &mut fresh, row, &new, biased, dim);
    let fresh_scales = encode_new(&mut fresh, dim);
    if CUBE_POS < tasks && place.to > 0 {
        rotate_queries::<F>(qkv, bias, angles, out, &place, kv, group, biased, dim);
        let slot = place.base + slot_of(table, &place, place.cached);
        write_codes(keys, values, scales, &fresh, fresh_scales, slot, dim);
    }
}
