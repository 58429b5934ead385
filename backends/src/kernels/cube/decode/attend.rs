//! Attention of a cube over its columns, and the kernel for whole rows.

use super::super::glu::tanh;
use super::super::launch::UNITS;
use super::tile::{KEYS, LANES, MASKED, PITCH};
use burn_cubecl::cubecl;
use cubecl::prelude::*;

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
    (
        rounded::<F>(a * cos - b * sin),
        rounded::<F>(b * cos + a * sin),
    )
}

/// The work of a cube: query heads of one key head of a row, and columns.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Place {
    pub row: usize,
    /// The key head, counted through all rows.
    pub key_head: usize,
    /// Offset of the first query head, and how many heads.
    pub first: usize,
    pub own: usize,
    /// Offset of the key head in the cache.
    pub base: usize,
    /// Columns that are seen. Those before `cached` are read from the cache; the one after them, if any, is in shared memory.
    pub from: usize,
    pub to: usize,
    pub cached: usize,
}

/// The work of a task, with all columns of its row. `task % chunks` is the chunk of query heads; the last column is the new one.
#[cube]
pub(super) fn place_of(
    live: &[i32],
    row: usize,
    task: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    columns: usize,
    window: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) -> Place {
    let chunk = task % chunks;
    let head = task / chunks % kv;
    let to = live[row * 2 + 1] as usize;
    let mut from = live[row * 2] as usize;
    if to > from + window {
        from = to - window;
    }
    Place {
        row,
        key_head: row * kv + head,
        first: (row * kv * group + head * group + chunk * heads) * dim,
        own: min(group - chunk * heads, heads),
        base: (row * kv + head) * columns * dim,
        from,
        to,
        // a row in no sequence has no columns
        cached: max(to, 1) - 1,
    }
}

/// Rotates queries and the new key into shared memory, copies the new value there, and writes key and value to the cache.
#[cube]
fn append_kv<F: Float>(
    q: &mut [F],
    k: &[F],
    v: &[F],
    keys: &mut [F],
    values: &mut [F],
    cos: &[f32],
    sin: &[f32],
    query: &mut Shared<[f32]>,
    fresh: &mut Shared<[f32]>,
    place: &Place,
    enters: bool,
    scale: f32,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let unit = UNIT_POS as usize;
    let new = place.key_head * dim;
    let mut i = unit;
    while i < comptime!(heads * half) {
        let h = i / half;
        let pair = i % half;
        let mut a = 0.0f32;
        let mut b = 0.0f32;
        if h < place.own {
            let angle = place.row * half + pair;
            let at = place.first + h * dim + pair;
            let (x, y) = rotated::<F>(q[at], q[at + half], cos[angle], sin[angle]);
            a = x * scale;
            b = y * scale;
        }
        query[h * dim + pair] = a;
        query[h * dim + half + pair] = b;
        i += UNITS;
    }
    let mut i = unit;
    while i < half {
        let angle = place.row * half + i;
        let (a, b) = rotated::<F>(k[new + i], k[new + half + i], cos[angle], sin[angle]);
        fresh[i] = a;
        fresh[half + i] = b;
        if enters {
            let at = place.base + (place.to - 1) * dim + i;
            keys[at] = F::cast_from(a);
            keys[at + half] = F::cast_from(b);
        }
        i += UNITS;
    }
    let mut i = unit;
    while i < dim {
        let x = v[new + i];
        fresh[dim + i] = f32::cast_from(x);
        if enters {
            values[place.base + (place.to - 1) * dim + i] = x;
        }
        i += UNITS;
    }
    sync_cube();
}

/// Products of a tile's keys and all queries, as a partial sum of each lane.
#[cube]
fn multiply<F: Float>(
    keys: &[F],
    fresh: &mut Shared<[f32]>,
    query: &mut Shared<[f32]>,
    partial: &mut Shared<[f32]>,
    place: &Place,
    tile: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    let column = tile + unit / LANES;
    let mut products = Array::<f32>::new(heads);
    #[unroll]
    for h in 0..heads {
        products[h] = 0.0f32;
    }
    if column < place.to {
        let mut d = lane;
        while d < dim {
            let mut x = fresh[d];
            // another cube may still be writing the new column to the cache
            if column < place.cached {
                x = f32::cast_from(keys[place.base + column * dim + d]);
            }
            #[unroll]
            for h in 0..heads {
                products[h] += x * query[h * dim + d];
            }
            d += LANES;
        }
    }
    #[unroll]
    for h in 0..heads {
        partial[lane * PITCH + comptime!(h * KEYS) + unit / LANES] = products[h];
    }
    sync_cube();
}

/// One step of the online softmax over a tile, of which a unit has one key and one query. `partial` gets the weights, query by query,
/// followed by the factors that rescale each query's accumulators. Returns the maximum, and the sum of the unit's weights.
#[cube]
fn online_softmax(
    partial: &mut Shared<[f32]>,
    scores: &mut Shared<[f32]>,
    place: &Place,
    tile: usize,
    largest: f32,
    total: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] heads: usize,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let scored = unit < comptime!(heads * KEYS) && tile + unit % KEYS < place.to;
    let mut score = f32::new(MASKED);
    if scored {
        score = 0.0f32;
        #[unroll]
        for lane in 0..LANES {
            score += partial[comptime!(lane * PITCH) + unit];
        }
        if capped {
            score = tanh(score / cap) * cap;
        }
    }
    scores[unit] = score;
    sync_cube();
    let mut now = largest;
    for c in 0..KEYS {
        now = max(now, scores[unit / KEYS * KEYS + c]);
    }
    let shrunk = (largest - now).exp();
    let mut weight = 0.0f32;
    if scored {
        weight = (score - now).exp();
    }
    partial[unit] = weight;
    if unit % KEYS < 1 {
        partial[UNITS + unit / KEYS] = shrunk;
    }
    sync_cube();
    (now, total * shrunk + weight)
}

/// Adds the weighted values of a tile to a unit's dimensions of all queries' accumulators.
#[cube]
fn accumulate_values<F: Float>(
    values: &[F],
    fresh: &mut Shared<[f32]>,
    partial: &mut Shared<[f32]>,
    mixed: &mut Array<f32>,
    place: &Place,
    tile: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let width = comptime!(if dim < UNITS { dim } else { UNITS });
    let parts = comptime!(UNITS / width);
    let each = comptime!(dim.div_ceil(width));
    let unit = UNIT_POS as usize;
    #[unroll]
    for h in 0..heads {
        let shrunk = partial[UNITS + h];
        #[unroll]
        for j in 0..each {
            mixed[comptime!(h * each + j)] *= shrunk;
        }
    }
    if unit < comptime!(parts * width) {
        let end = min(tile + KEYS, place.to);
        let mut column = tile + unit / width;
        while column < end {
            #[unroll]
            for j in 0..each {
                let d = unit % width + comptime!(j * width);
                if d < dim {
                    let mut x = fresh[dim + d];
                    if column < place.cached {
                        x = f32::cast_from(values[place.base + column * dim + d]);
                    }
                    #[unroll]
                    for h in 0..heads {
                        let weight = partial[h * KEYS + column - tile];
                        mixed[comptime!(h * each + j)] += weight * x;
                    }
                }
            }
            column += parts;
        }
    }
    sync_cube();
}

/// Attention over the columns of a place, written from `first` on: the weighted mean of the values (`whole`), or, for a part of the
/// columns, their weighted sum, followed by each head's maximum and sum of weights.
#[cube]
pub(super) fn attend_columns<F: Float, O: Float>(
    keys: &[F],
    values: &[F],
    out: &mut [O],
    query: &mut Shared<[f32]>,
    fresh: &mut Shared<[f32]>,
    place: &Place,
    first: usize,
    writes: bool,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] whole: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let mut partial = Shared::<[f32]>::new_slice(comptime!(LANES * PITCH));
    let mut scores = Shared::<[f32]>::new_slice(UNITS);
    let mut mixed = Array::<f32>::new(comptime!(mixed_of(heads, dim)));
    #[unroll]
    for j in 0..comptime!(mixed_of(heads, dim)) {
        mixed[j] = 0.0f32;
    }
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut tile = place.from;
    while tile < place.to {
        multiply::<F>(keys, fresh, query, &mut partial, place, tile, heads, dim);
        let (now, sum) = online_softmax(
            &mut partial,
            &mut scores,
            place,
            tile,
            largest,
            total,
            cap,
            capped,
            heads,
        );
        largest = now;
        total = sum;
        accumulate_values::<F>(
            values,
            fresh,
            &mut partial,
            &mut mixed,
            place,
            tile,
            heads,
            dim,
        );
        tile += KEYS;
    }
    write_output::<O>(
        out,
        &mut partial,
        &mut scores,
        &mut mixed,
        largest,
        total,
        first,
        place.own,
        writes,
        whole,
        heads,
        dim,
    );
}

/// Sums the units' accumulators of each dimension, and writes the result.
#[cube]
fn write_output<O: Float>(
    out: &mut [O],
    partial: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    mixed: &mut Array<f32>,
    largest: f32,
    total: f32,
    first: usize,
    own: usize,
    writes: bool,
    #[comptime] whole: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let width = comptime!(if dim < UNITS { dim } else { UNITS });
    let parts = comptime!(UNITS / width);
    let each = comptime!(dim.div_ceil(width));
    let unit = UNIT_POS as usize;
    totals[unit] = total;
    #[unroll]
    for j in 0..each {
        #[unroll]
        for h in 0..heads {
            partial[comptime!(h * UNITS) + unit] = mixed[comptime!(h * each + j)];
        }
        sync_cube();
        let mut i = unit;
        while i < own * width {
            let h = i / width;
            let d = i % width + comptime!(j * width);
            let mut sum = 0.0f32;
            for p in 0..parts {
                sum += partial[h * UNITS + p * width + i % width];
            }
            if whole {
                let all = softmax_denominator(totals, h);
                // a row in no sequence sees no column and gets zeros
                if all > 0.0f32 {
                    sum /= all;
                }
            }
            if d < dim && writes {
                out[first + h * dim + d] = O::cast_from(sum);
            }
            i += UNITS;
        }
        sync_cube();
    }
    if !whole && unit < own * KEYS && unit % KEYS < 1 && writes {
        let h = unit / KEYS;
        let at = first + comptime!(heads * dim) + h;
        out[at] = O::cast_from(largest);
        out[at + heads] = O::cast_from(softmax_denominator(totals, h));
    }
}

/// The sum of all weights of a query.
#[cube]
fn softmax_denominator(totals: &mut Shared<[f32]>, head: usize) -> f32 {
    let mut all = 0.0f32;
    for c in 0..KEYS {
        all += totals[head * KEYS + c];
    }
    all
}

/// Accumulators of a unit: some dimensions of each head.
const fn mixed_of(heads: usize, dim: usize) -> usize {
    let width = if dim < UNITS { dim } else { UNITS };
    heads * dim.div_ceil(width)
}

/// Attention over whole rows; the output replaces the queries.
#[cube(launch, address_type = "dynamic")]
pub(super) fn attend<F: Float>(
    q: &mut [F],
    k: &[F],
    v: &[F],
    keys: &mut [F],
    values: &mut [F],
    cos: &[f32],
    sin: &[f32],
    live: &[i32],
    tasks: usize,
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
    // the new key, then the new value
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let task = min(CUBE_POS, tasks - 1);
    let row = task / (chunks * kv);
    let place = place_of(
        live, row, task, kv, group, chunks, columns, window, heads, dim,
    );
    let writes = CUBE_POS < tasks;
    let enters = writes && task % chunks < 1 && place.to > place.from;
    append_kv::<F>(
        q, k, v, keys, values, cos, sin, &mut query, &mut fresh, &place, enters, scale, heads, dim,
    );
    attend_columns::<F, F>(
        &*keys,
        &*values,
        q,
        &mut query,
        &mut fresh,
        &place,
        place.first,
        writes,
        cap,
        capped,
        true,
        heads,
        dim,
    );
}
