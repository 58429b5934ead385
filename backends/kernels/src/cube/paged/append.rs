//! The new token of a row: its key and value in shared memory, as they are stored, and in the pool.

use super::super::launch::UNITS;
use super::codes::{encoded, magnitude, placed, scale_bits};
use super::tile::pack;
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Units that find the largest magnitude of a key or value.
const REDUCERS: usize = 32;

/// A value rounded to a type.
#[cube]
fn rounded<F: Float>(x: f32) -> f32 {
    f32::cast_from(F::cast_from(x))
}

/// A pair rotated by an angle, rounded to a type.
#[cube]
pub(super) fn rotated<F: Float>(a: F, b: F, cos: f32, sin: f32) -> (f32, f32) {
    let a = f32::cast_from(a);
    let b = f32::cast_from(b);
    (rounded::<F>(a * cos - b * sin), rounded::<F>(b * cos + a * sin))
}

/// An element of a query, key or value: with its bias, rounded as their sum would be where it is stored.
#[cube]
pub(super) fn element<F: Float>(x: &[F], bias: &[F], at: usize, bias_at: usize, #[comptime] biased: bool) -> F {
    let mut y = x[at];
    if biased {
        y = F::cast_from(f32::cast_from(y) + f32::cast_from(bias[bias_at]));
    }
    y
}

/// Where the new key and value of a key head begin, and their biases.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct NewToken {
    pub key: usize,
    pub value: usize,
    pub key_bias: usize,
    pub value_bias: usize,
}

/// Rotates the new key of a key head into shared memory, and copies the new value after it.
#[cube]
pub(super) fn load_new<F: Float>(
    k: &[F],
    v: &[F],
    bias: &[F],
    angles: &[f32],
    fresh: &mut Shared<[f32]>,
    row: usize,
    new: &NewToken,
    #[comptime] biased: bool,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let mut i = UNIT_POS as usize;
    while i < half {
        let angle = row * dim + i;
        let x = element::<F>(k, bias, new.key + i, new.key_bias + i, biased);
        let y = element::<F>(k, bias, new.key + half + i, new.key_bias + half + i, biased);
        let (a, b) = rotated::<F>(x, y, angles[angle], angles[angle + half]);
        fresh[i] = a;
        fresh[half + i] = b;
        i += UNITS;
    }
    let mut i = UNIT_POS as usize;
    while i < dim {
        let x = element::<F>(v, bias, new.value + i, new.value_bias + i, biased);
        fresh[dim + i] = f32::cast_from(x);
        i += UNITS;
    }
    sync_cube();
}

/// Writes the new key and value to a slot, counted through all key heads.
#[cube]
pub(super) fn write_new<F: Float>(
    keys: &mut [F],
    values: &mut [F],
    fresh: &Shared<[f32]>,
    slot: usize,
    #[comptime] dim: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < dim {
        keys[slot * dim + i] = F::cast_from(fresh[i]);
        values[slot * dim + i] = F::cast_from(fresh[dim + i]);
        i += UNITS;
    }
}

/// The largest magnitude that units found, as bits.
#[cube]
fn largest_of(lanes: &Shared<[u32]>, first: usize) -> u32 {
    let mut largest = 0u32;
    for i in 0..REDUCERS {
        largest = max(largest, lanes[first + i]);
    }
    largest
}

/// Replaces the new key and value in shared memory by their codes. Gives the bits of both scales, the key's in the low
/// half.
#[cube]
pub(super) fn encode_new(fresh: &mut Shared<[f32]>, #[comptime] dim: usize) -> u32 {
    let mut lanes = Shared::<[u32]>::new_slice(comptime!(2 * REDUCERS));
    let unit = UNIT_POS as usize;
    if unit < comptime!(2 * REDUCERS) {
        let first = unit / REDUCERS * dim;
        let mut largest = 0u32;
        let mut i = unit % REDUCERS;
        while i < dim {
            largest = max(largest, magnitude(fresh[first + i]));
            i += REDUCERS;
        }
        lanes[unit] = largest;
    }
    sync_cube();
    let key = scale_bits(largest_of(&lanes, 0));
    let value = scale_bits(largest_of(&lanes, REDUCERS));
    let mut i = unit;
    while i < comptime!(2 * dim) {
        let mut bits = key;
        if i >= dim {
            bits = value;
        }
        let code = encoded(fresh[i], bits);
        fresh[i] = code;
        i += UNITS;
    }
    sync_cube();
    key | (value << 16u32)
}

/// Writes the new key's and value's codes, and their scales, to a slot, counted through all key heads.
#[cube]
pub(super) fn write_codes(
    keys: &mut [i32],
    values: &mut [i32],
    scales: &mut [i32],
    fresh: &Shared<[f32]>,
    fresh_scales: u32,
    slot: usize,
    #[comptime] dim: usize,
) {
    let words = comptime!(dim / pack(true));
    let mut i = UNIT_POS as usize;
    while i < words {
        let mut key = 0i32;
        let mut value = 0i32;
        #[unroll]
        for j in 0..comptime!(pack(true)) {
            key |= placed(fresh[i * comptime!(pack(true)) + j], j);
            value |= placed(fresh[dim + i * comptime!(pack(true)) + j], j);
        }
        keys[slot * words + i] = key;
        values[slot * words + i] = value;
        i += UNITS;
    }
    if UNIT_POS == 0 {
        scales[slot] = i32::reinterpret(fresh_scales);
    }
}
