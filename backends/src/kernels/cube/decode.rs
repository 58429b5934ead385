//! Attention of one new token a sequence over its cached keys and values: one pass over live columns, with softmax as it goes.
//!
//! A cube has some query heads of one key head of one row. It turns them and the new key, writes that and the new value to the
//! cache, and takes columns a few at a time: [`LANES`] units have a key between them and multiply it by every query, then each
//! unit has some dimensions of the values. A key and a value are read once a cube, side by side.

use super::glu::tanh;
use super::launch::{UNITS, address, cubes, dims, elem, integers, knows, owned, plain};
use crate::kernels::choice::Operation;
use crate::kernels::shapes::DecodeShape;
use crate::kernels::tape::Engine;
use crate::trace::span;
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Units that have a key between them.
const LANES: usize = 8;

/// Keys at a time.
const KEYS: usize = UNITS / LANES;

/// Most query heads of a cube, and numbers of them: WebGPU promises 16 KiB of shared memory.
const HEADS: usize = 8;
const QUERIES: usize = 1024;

/// Numbers between those of one lane and the next, so that lanes side by side use different banks.
const PITCH: usize = UNITS + 4;

/// What a score is before there is one: finite, so that differences are.
const NOTHING: f64 = -1.0e30;

/// See [`crate::kernels::decode_attention`].
pub(in crate::kernels) fn decode_attention(
    [q, k, v]: [Tensor<2>; 3],
    [keys, values]: [Tensor<4>; 2],
    shape: &DecodeShape<'_>,
) -> Option<(Tensor<2>, [Tensor<4>; 2])> {
    let live = shape.decoded.live.as_ref()?;
    let alike = [k.dtype(), v.dtype(), keys.dtype(), values.dtype()];
    if !knows(Operation::DecodeAttention, &q) || alike.iter().any(|&dtype| dtype != q.dtype()) {
        return None;
    }
    let _span = span("decode attention", 0.0);
    let [rows, width] = q.dims();
    let [_, kv, columns, dim] = keys.dims();
    // the mixed values take the place of the queries: with a buffer of their own there would be nine
    let [q, k, v] = [owned(plain(q)), plain(k), plain(v)];
    let [keys, values] = [keys, values].map(|cache| owned(plain(cache)));
    let [cos, sin] = shape.angles.map(|t| plain(t.clone().cast(DType::F32)));
    let group = width / dim / kv;
    let heads = group.min(HEADS).min((QUERIES / dim).max(1));
    let chunks = group.div_ceil(heads);
    debug_assert_eq!(dims(&k), [rows, kv * dim]);
    attend::launch(
        &q.client.clone(),
        cubes(&q, rows * kv * chunks),
        CubeDim::new_1d(UNITS as u32),
        address([&keys, &values, &q]),
        q.clone().into_buffer_arg(),
        k.into_buffer_arg(),
        v.into_buffer_arg(),
        keys.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        cos.into_buffer_arg(),
        sin.into_buffer_arg(),
        integers(live).into_buffer_arg(),
        rows * kv * chunks,
        kv,
        group,
        chunks,
        columns,
        shape.window.unwrap_or(columns).min(columns),
        shape.scale as f32,
        shape.softcap.unwrap_or(1.0) as f32,
        shape.softcap.is_some(),
        heads,
        dim,
        elem(&q),
    );
    Some((Cube::close(q), [keys, values].map(Cube::close)))
}

/// A number as a type stores it.
#[cube]
fn rounded<F: Float>(x: f32) -> f32 {
    f32::cast_from(F::cast_from(x))
}

/// A pair that is turned by an angle, as a type stores it.
#[cube]
fn turned<F: Float>(a: F, b: F, cos: f32, sin: f32) -> (f32, f32) {
    let a = f32::cast_from(a);
    let b = f32::cast_from(b);
    (
        rounded::<F>(a * cos - b * sin),
        rounded::<F>(b * cos + a * sin),
    )
}

/// What a cube has: query heads of one key head of a row.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
struct Place {
    row: usize,
    /// Of keys, among all rows'.
    key_head: usize,
    /// First number of the first query head, and how many heads.
    first: usize,
    own: usize,
    /// First number of the key head in the cache.
    base: usize,
    /// Columns that are seen; the last is the new one.
    from: usize,
    to: usize,
    /// Whether the cube writes what it mixes, and the new column.
    writes: bool,
    enters: bool,
}

#[cube]
fn place_of(
    live: &[i32],
    tasks: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    columns: usize,
    window: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) -> Place {
    let task = min(CUBE_POS, tasks - 1);
    let chunk = task % chunks;
    let head = task / chunks % kv;
    let row = task / (chunks * kv);
    let to = live[row * 2 + 1] as usize;
    let mut from = live[row * 2] as usize;
    if to > from + window {
        from = to - window;
    }
    let writes = CUBE_POS < tasks;
    Place {
        row,
        key_head: row * kv + head,
        first: (row * kv * group + head * group + chunk * heads) * dim,
        own: min(group - chunk * heads, heads),
        base: (row * kv + head) * columns * dim,
        from,
        to,
        writes,
        enters: writes && chunk == 0 && to > from,
    }
}

/// Turns queries and the new key to shared memory, with the new value, and writes key and value to the cache.
#[cube]
fn enter<F: Float>(
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
            let (x, y) = turned::<F>(q[at], q[at + half], cos[angle], sin[angle]);
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
        let (a, b) = turned::<F>(k[new + i], k[new + half + i], cos[angle], sin[angle]);
        fresh[i] = a;
        fresh[half + i] = b;
        if place.enters {
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
        if place.enters {
            values[place.base + (place.to - 1) * dim + i] = x;
        }
        i += UNITS;
    }
    sync_cube();
}

/// Products of a tile's keys with all queries, each in the parts that its lanes have.
#[cube]
fn multiply<F: Float>(
    keys: &mut [F],
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
            // the new column may not be in the cache yet
            if column + 1 < place.to {
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

/// Softmax goes on by a tile, of which a unit has one key and one query. `partial` then has weights, query by query, and behind
/// them what each query's sums so far are multiplied by. The largest score, and what the unit's keys weigh.
#[cube]
fn soften(
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
    let mut score = f32::new(NOTHING);
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

/// What the columns of a tile add to a unit's dimensions of the mixed values of all queries.
#[cube]
fn mix<F: Float>(
    values: &mut [F],
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
                    if column + 1 < place.to {
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

/// Adds up what units have of each dimension, and writes it.
#[cube]
fn conclude<F: Float>(
    out: &mut [F],
    partial: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    mixed: &mut Array<f32>,
    place: &Place,
    total: f32,
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
        while i < place.own * width {
            let h = i / width;
            let d = i % width + comptime!(j * width);
            let mut all = 0.0f32;
            for c in 0..KEYS {
                all += totals[h * KEYS + c];
            }
            let mut sum = 0.0f32;
            for p in 0..parts {
                sum += partial[h * UNITS + p * width + i % width];
            }
            // a row in no sequence sees nothing, and gets zeros
            if all > 0.0f32 {
                sum /= all;
            }
            if d < dim && place.writes {
                out[place.first + h * dim + d] = F::cast_from(sum);
            }
            i += UNITS;
        }
        sync_cube();
    }
}

#[cube(launch, address_type = "dynamic")]
fn attend<F: Float>(
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
    // the new key, and the new value
    let mut fresh = Shared::<[f32]>::new_slice(comptime!(2 * dim));
    let mut partial = Shared::<[f32]>::new_slice(comptime!(LANES * PITCH));
    let mut scores = Shared::<[f32]>::new_slice(UNITS);
    let place = place_of(live, tasks, kv, group, chunks, columns, window, heads, dim);
    enter::<F>(
        q, k, v, keys, values, cos, sin, &mut query, &mut fresh, &place, scale, heads, dim,
    );
    let width = comptime!(if dim < UNITS { dim } else { UNITS });
    let each = comptime!(dim.div_ceil(width));
    let mut mixed = Array::<f32>::new(comptime!(heads * each));
    #[unroll]
    for j in 0..comptime!(heads * each) {
        mixed[j] = 0.0f32;
    }
    let mut largest = f32::new(NOTHING);
    let mut total = 0.0f32;
    let mut tile = place.from;
    while tile < place.to {
        multiply::<F>(
            keys,
            &mut fresh,
            &mut query,
            &mut partial,
            &place,
            tile,
            heads,
            dim,
        );
        let (now, sum) = soften(
            &mut partial,
            &mut scores,
            &place,
            tile,
            largest,
            total,
            cap,
            capped,
            heads,
        );
        largest = now;
        total = sum;
        mix::<F>(
            values,
            &mut fresh,
            &mut partial,
            &mut mixed,
            &place,
            tile,
            heads,
            dim,
        );
        tile += KEYS;
    }
    conclude::<F>(
        q,
        &mut partial,
        &mut scores,
        &mut mixed,
        &place,
        total,
        heads,
        dim,
    );
}
