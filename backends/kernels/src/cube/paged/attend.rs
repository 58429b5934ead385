//! Attention of a cube over the columns of a row, which are tokens in the blocks of its table.

use super::super::glu::tanh;
use super::super::launch::UNITS;
use super::append::{element, rotated};
use super::codes::{scale_of, widen};
use super::tile::{KEYS, LANES, MASKED, PITCH, pack};
use burn_cubecl::cubecl;
use cubecl::prelude::*;
use firebrick_spec::BLOCK_SIZE;

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
    /// The key head's first slot in the pool.
    pub base: usize,
    /// Offset of the row's blocks in the table.
    pub blocks: usize,
    /// Columns that are seen. Those before `cached` are read from the pool; the one after them, if any, is in shared
    /// memory.
    pub from: usize,
    pub to: usize,
    pub cached: usize,
}

/// The work of a task, with all columns of its row. `task % chunks` is the chunk of query heads; the last column is the
/// new one.
#[cube]
pub(super) fn place_of(
    table: &[i32],
    row: usize,
    task: usize,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    chunks: usize,
    slots: usize,
    window: usize,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) -> Place {
    let chunk = task % chunks;
    let head = task / chunks % kv;
    // a row in no sequence has no columns
    let to = table[row] as usize;
    Place {
        row,
        key_head: row * kv + head,
        first: (row * kv * group + head * group + chunk * heads) * dim,
        own: min(group - chunk * heads, heads),
        base: head * slots,
        blocks: 3 * rows + row * stride,
        from: to - min(window, to),
        to,
        cached: max(to, 1) - 1,
    }
}

/// The slot of a column, or of the last where there are fewer columns.
#[cube]
pub(super) fn slot_of(table: &[i32], place: &Place, column: usize) -> usize {
    let column = min(column, max(place.to, 1) - 1);
    table[place.blocks + column / BLOCK_SIZE] as usize * BLOCK_SIZE + column % BLOCK_SIZE
}

/// Rotates the queries of a place, which begin at `first`, into shared memory, scaled.
#[cube]
pub(super) fn load_queries<F: Float>(
    q: &[F],
    bias: &[F],
    angles: &[f32],
    query: &mut Shared<[f32]>,
    place: &Place,
    first: usize,
    first_bias: usize,
    scale: f32,
    #[comptime] biased: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let mut i = UNIT_POS as usize;
    while i < comptime!(heads * half) {
        let h = i / half;
        let pair = i % half;
        let mut a = 0.0f32;
        let mut b = 0.0f32;
        if h < place.own {
            let angle = place.row * dim + pair;
            let own = h * dim + pair;
            let x = element::<F>(q, bias, first + own, first_bias + own, biased);
            let y = element::<F>(q, bias, first + own + half, first_bias + own + half, biased);
            let (x, y) = rotated::<F>(x, y, angles[angle], angles[angle + half]);
            a = x * scale;
            b = y * scale;
        }
        query[h * dim + pair] = a;
        query[h * dim + half + pair] = b;
        i += UNITS;
    }
}

/// Numbers of a token: from the pool, or, of the new one, from shared memory.
#[cube]
fn load<P: Numeric>(
    pool: &[P],
    at: usize,
    fresh: &Shared<[f32]>,
    first: usize,
    cached: bool,
    numbers: &mut Array<f32>,
    #[comptime] coded: bool,
) {
    // another cube may still be writing the new token to the pool
    if cached {
        widen::<P>(pool[at], numbers, coded);
    } else {
        #[unroll]
        for j in 0..comptime!(pack(coded)) {
            numbers[j] = fresh[first + j];
        }
    }
}

/// Products of a tile's keys and all queries, as a partial sum of each lane. `factors` gets the scales of codes of the
/// tile's values.
#[cube]
fn multiply<P: Numeric>(
    keys: &[P],
    scales: &[i32],
    fresh: &Shared<[f32]>,
    query: &Shared<[f32]>,
    partial: &mut Shared<[f32]>,
    factors: &mut Shared<[f32]>,
    place: &Place,
    tile: usize,
    slot: usize,
    fresh_scales: u32,
    #[comptime] coded: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    let column = tile + unit / LANES;
    let elements = comptime!(dim / pack(coded));
    let mut products = Array::<f32>::new(heads);
    let mut numbers = Array::<f32>::new(comptime!(pack(coded)));
    #[unroll]
    for h in 0..heads {
        products[h] = 0.0f32;
    }
    if column < place.to {
        let at = place.base + slot;
        let cached = column < place.cached;
        let mut i = lane;
        while i < elements {
            let d = i * comptime!(pack(coded));
            load::<P>(keys, at * elements + i, fresh, d, cached, &mut numbers, coded);
            #[unroll]
            for j in 0..comptime!(pack(coded)) {
                #[unroll]
                for h in 0..heads {
                    products[h] += numbers[j] * query[h * dim + d + j];
                }
            }
            i += LANES;
        }
        if coded {
            let mut bits = fresh_scales;
            if cached {
                bits = u32::reinterpret(scales[at]);
            }
            let scale = scale_of(bits);
            #[unroll]
            for h in 0..heads {
                products[h] *= scale;
            }
            if lane < 1 {
                factors[unit / LANES] = scale_of(bits >> 16u32);
            }
        }
    }
    #[unroll]
    for h in 0..heads {
        partial[lane * PITCH + comptime!(h * KEYS) + unit / LANES] = products[h];
    }
    sync_cube();
}

/// One step of the online softmax over a tile, of which a unit has one key and one query. `partial` gets the weights of
/// the tile's values, query by query, followed by the factors that rescale each query's accumulators. Returns the
/// maximum, and the sum of the unit's weights.
#[cube]
fn online_softmax(
    partial: &mut Shared<[f32]>,
    scores: &mut Shared<[f32]>,
    factors: &Shared<[f32]>,
    place: &Place,
    tile: usize,
    largest: f32,
    total: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] coded: bool,
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
    let mut factor = 1.0f32;
    if scored {
        weight = (score - now).exp();
        if coded {
            factor = factors[unit % KEYS];
        }
    }
    partial[unit] = weight * factor;
    if unit % KEYS < 1 {
        partial[UNITS + unit / KEYS] = shrunk;
    }
    sync_cube();
    (now, total * shrunk + weight)
}

/// Adds the weighted values of a tile to a unit's dimensions of all queries' accumulators.
#[cube]
fn accumulate_values<P: Numeric>(
    values: &[P],
    fresh: &Shared<[f32]>,
    partial: &Shared<[f32]>,
    slots: &Shared<[u32]>,
    mixed: &mut Array<f32>,
    place: &Place,
    tile: usize,
    #[comptime] coded: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let pack = comptime!(pack(coded));
    let elements = comptime!(dim / pack);
    let width = comptime!(if elements < UNITS { elements } else { UNITS });
    let parts = comptime!(UNITS / width);
    let each = comptime!(elements.div_ceil(width));
    let unit = UNIT_POS as usize;
    let mut numbers = Array::<f32>::new(pack);
    #[unroll]
    for h in 0..heads {
        let shrunk = partial[UNITS + h];
        #[unroll]
        for j in 0..comptime!(each * pack) {
            mixed[comptime!(h * each * pack + j)] *= shrunk;
        }
    }
    if unit < comptime!(parts * width) {
        let end = min(tile + KEYS, place.to);
        let mut column = tile + unit / width;
        while column < end {
            let at = (place.base + slots[column - tile] as usize) * elements;
            let cached = column < place.cached;
            #[unroll]
            for e in 0..each {
                let i = unit % width + comptime!(e * width);
                if i < elements {
                    load::<P>(values, at + i, fresh, dim + i * pack, cached, &mut numbers, coded);
                    #[unroll]
                    for h in 0..heads {
                        let weight = partial[h * KEYS + column - tile];
                        #[unroll]
                        for j in 0..pack {
                            mixed[comptime!((h * each + e) * pack + j)] += weight * numbers[j];
                        }
                    }
                }
            }
            column += parts;
        }
    }
    sync_cube();
}

/// Attention over the columns of a place, written from `first` on: the weighted mean of the values (`whole`), or, for a
/// part of the columns, their weighted sum, followed by each head's maximum and sum of weights. A pool has elements of
/// type `P`: floats, or, where it is `coded`, words of four codes, which `scales` belong to.
#[cube]
pub(super) fn attend_columns<P: Numeric, O: Float>(
    keys: &[P],
    values: &[P],
    scales: &[i32],
    table: &[i32],
    out: &mut [O],
    query: &Shared<[f32]>,
    fresh: &Shared<[f32]>,
    fresh_scales: u32,
    place: &Place,
    first: usize,
    writes: bool,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] whole: bool,
    #[comptime] coded: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let mut partial = Shared::<[f32]>::new_slice(comptime!(LANES * PITCH));
    let mut scores = Shared::<[f32]>::new_slice(UNITS);
    // of the keys of a tile
    let mut slots = Shared::<[u32]>::new_slice(KEYS);
    let mut factors = Shared::<[f32]>::new_slice(comptime!(if coded { KEYS } else { 1 }));
    let mut mixed = Array::<f32>::new(comptime!(mixed_of(coded, heads, dim)));
    #[unroll]
    for j in 0..comptime!(mixed_of(coded, heads, dim)) {
        mixed[j] = 0.0f32;
    }
    let own = UNIT_POS as usize / LANES;
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut tile = place.from;
    let mut slot = slot_of(table, place, tile + own);
    while tile < place.to {
        if UNIT_POS as usize % LANES < 1 {
            slots[own] = slot as u32;
        }
        // looked up ahead, so that the next tile's keys need not wait for it
        let next = slot_of(table, place, tile + own + KEYS);
        multiply::<P>(
            keys,
            scales,
            fresh,
            query,
            &mut partial,
            &mut factors,
            place,
            tile,
            slot,
            fresh_scales,
            coded,
            heads,
            dim,
        );
        slot = next;
        let (now, sum) =
            online_softmax(&mut partial, &mut scores, &factors, place, tile, largest, total, cap, capped, coded, heads);
        largest = now;
        total = sum;
        accumulate_values::<P>(values, fresh, &partial, &slots, &mut mixed, place, tile, coded, heads, dim);
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
        coded,
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
    #[comptime] coded: bool,
    #[comptime] heads: usize,
    #[comptime] dim: usize,
) {
    let pack = comptime!(pack(coded));
    let elements = comptime!(dim / pack);
    let width = comptime!(if elements < UNITS { elements } else { UNITS });
    let parts = comptime!(UNITS / width);
    let each = comptime!(elements.div_ceil(width) * pack);
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
            let d = (i % width + comptime!(j / pack * width)) * pack + comptime!(j % pack);
            let mut sum = 0.0f32;
            for p in 0..parts {
                sum += partial[h * UNITS + p * width + i % width];
            }
            if whole {
                let all = softmax_denominator(&*totals, h);
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
        out[at + heads] = O::cast_from(softmax_denominator(&*totals, h));
    }
}

/// The sum of all weights of a query.
#[cube]
fn softmax_denominator(totals: &Shared<[f32]>, head: usize) -> f32 {
    let mut all = 0.0f32;
    for c in 0..KEYS {
        all += totals[head * KEYS + c];
    }
    all
}

/// Accumulators of a unit: some dimensions of each head.
const fn mixed_of(coded: bool, heads: usize, dim: usize) -> usize {
    let elements = dim / pack(coded);
    let width = if elements < UNITS { elements } else { UNITS };
    heads * elements.div_ceil(width) * pack(coded)
}
