//! Attention of a cube over the columns of a row, which are tokens in the blocks of its table.

use super::super::glu::tanh;
use super::codes::scale_of;
use super::place::{Place, Sizes, slot_of};
use super::storage::{Kind, Storage};
use super::tile::{KEYS, LANES, MASKED, PITCH};
use crate::cube::prelude::*;

/// Numbers of a token: from the pool, or, of the new one, from shared memory.
#[cube]
fn load<P: Storage>(
    pool: &P,
    #[comptime] kind: Kind,
    at: usize,
    fresh: &Shared<[f32]>,
    first: usize,
    cached: bool,
    numbers: &mut Array<f32>,
) {
    // another cube may still be writing the new token to the pool
    if cached {
        P::load(pool, kind, at, numbers);
    } else {
        #[unroll]
        for j in 0..P::PACK {
            numbers[j] = fresh[first + j];
        }
    }
}

/// Products of a tile's keys and all queries, as a partial sum of each lane. `factors` gets the scales of codes of the
/// tile's values.
#[cube]
fn multiply<P: Storage>(
    pool: &P,
    fresh: &Shared<[f32]>,
    query: &Shared<[f32]>,
    partial: &mut Shared<[f32]>,
    factors: &mut Shared<[f32]>,
    place: &Place,
    tile: usize,
    slot: usize,
    fresh_scales: u32,
    #[comptime] sizes: Sizes,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    let column = tile + unit / LANES;
    let (heads, dim) = comptime!((sizes.heads, sizes.dim));
    let elements = comptime!(dim / P::PACK);
    let mut products = Array::<f32>::new(heads);
    let mut numbers = Array::<f32>::new(P::PACK);
    #[unroll]
    for h in 0..heads {
        products[h] = 0.0f32;
    }
    if column < place.to {
        let at = place.base + slot;
        let cached = column < place.cached;
        let mut i = lane;
        while i < elements {
            let d = i * P::PACK;
            load::<P>(pool, Kind::Key, at * elements + i, fresh, d, cached, &mut numbers);
            #[unroll]
            for j in 0..P::PACK {
                #[unroll]
                for h in 0..heads {
                    products[h] += numbers[j] * query[h * dim + d + j];
                }
            }
            i += LANES;
        }
        if P::SCALED {
            let mut bits = fresh_scales;
            if cached {
                bits = P::scales(pool, at);
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
    #[comptime] scaled: bool,
    #[comptime] sizes: Sizes,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let scored = unit < comptime!(sizes.heads * KEYS) && tile + unit % KEYS < place.to;
    let mut score = f32::new(MASKED);
    if scored {
        score = 0.0f32;
        #[unroll]
        for lane in 0..LANES {
            score += partial[comptime!(lane * PITCH) + unit];
        }
        if comptime!(sizes.capped) {
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
        if scaled {
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
fn accumulate_values<P: Storage>(
    pool: &P,
    fresh: &Shared<[f32]>,
    partial: &Shared<[f32]>,
    slots: &Shared<[u32]>,
    mixed: &mut Array<f32>,
    place: &Place,
    tile: usize,
    #[comptime] sizes: Sizes,
) {
    let (pack, heads, dim) = comptime!((P::PACK, sizes.heads, sizes.dim));
    let (elements, width, each) = comptime!(spread::<P>(dim));
    let parts = comptime!(UNITS / width);
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
                    load::<P>(pool, Kind::Value, at + i, fresh, dim + i * pack, cached, &mut numbers);
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
/// part of the columns, their weighted sum, followed by each head's maximum and sum of weights.
#[cube]
pub(super) fn attend_columns<P: Storage, O: Float>(
    pool: &P,
    table: &[i32],
    out: &mut [O],
    query: &Shared<[f32]>,
    fresh: &Shared<[f32]>,
    fresh_scales: u32,
    place: &Place,
    first: usize,
    writes: bool,
    cap: f32,
    #[comptime] whole: bool,
    #[comptime] sizes: Sizes,
) {
    let mut partial = Shared::<[f32]>::new_slice(comptime!(LANES * PITCH));
    let mut scores = Shared::<[f32]>::new_slice(UNITS);
    // of the keys of a tile
    let mut slots = Shared::<[u32]>::new_slice(KEYS);
    let mut factors = Shared::<[f32]>::new_slice(comptime!(if P::SCALED { KEYS } else { 1 }));
    let count = comptime!(accumulators::<P>(sizes));
    let mut mixed = Array::<f32>::new(count);
    #[unroll]
    for j in 0..count {
        mixed[j] = 0.0f32;
    }
    let group = UNIT_POS as usize / LANES;
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut tile = place.from;
    let mut slot = slot_of(table, place, tile + group);
    while tile < place.to {
        if UNIT_POS as usize % LANES < 1 {
            slots[group] = slot as u32;
        }
        // looked up ahead, so that the next tile's keys need not wait for it
        let next = slot_of(table, place, tile + group + KEYS);
        multiply::<P>(pool, fresh, query, &mut partial, &mut factors, place, tile, slot, fresh_scales, sizes);
        slot = next;
        let (now, sum) =
            online_softmax(&mut partial, &mut scores, &factors, place, tile, largest, total, cap, P::SCALED, sizes);
        largest = now;
        total = sum;
        accumulate_values::<P>(pool, fresh, &partial, &slots, &mut mixed, place, tile, sizes);
        tile += KEYS;
    }
    let heads = place.heads;
    write_output::<P, O>(out, &mut partial, &mut scores, &mixed, largest, total, first, heads, writes, whole, sizes);
}

/// Sums the units' accumulators of each dimension, and writes the result.
#[cube]
fn write_output<P: Storage, O: Float>(
    out: &mut [O],
    partial: &mut Shared<[f32]>,
    totals: &mut Shared<[f32]>,
    mixed: &Array<f32>,
    largest: f32,
    total: f32,
    first: usize,
    count: usize,
    writes: bool,
    #[comptime] whole: bool,
    #[comptime] sizes: Sizes,
) {
    let (pack, heads, dim) = comptime!((P::PACK, sizes.heads, sizes.dim));
    let (_, width, each) = comptime!(spread::<P>(dim));
    let parts = comptime!(UNITS / width);
    let each = comptime!(each * pack);
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
        while i < count * width {
            let h = i / width;
            let d = (i % width + comptime!(j / pack * width)) * pack + comptime!(j % pack);
            let mut sum = 0.0f32;
            for p in 0..parts {
                sum += partial[h * UNITS + p * width + i % width];
            }
            if whole {
                let denominator = softmax_denominator(&*totals, h);
                // a row in no sequence sees no column and gets zeros
                if denominator > 0.0f32 {
                    sum /= denominator;
                }
            }
            if d < dim && writes {
                out[first + h * dim + d] = O::cast_from(sum);
            }
            i += UNITS;
        }
        sync_cube();
    }
    if !whole && unit < count * KEYS && unit % KEYS < 1 && writes {
        let h = unit / KEYS;
        let at = first + comptime!(heads * dim) + h;
        out[at] = O::cast_from(largest);
        out[at + heads] = O::cast_from(softmax_denominator(&*totals, h));
    }
}

/// The sum of all weights of a query.
#[cube]
fn softmax_denominator(totals: &Shared<[f32]>, head: usize) -> f32 {
    let mut sum = 0.0f32;
    for c in 0..KEYS {
        sum += totals[head * KEYS + c];
    }
    sum
}

/// Elements of a value, units among which they are divided, and elements of a unit.
const fn spread<P: Storage>(dim: usize) -> (usize, usize, usize) {
    let elements = dim / P::PACK;
    let width = if elements < UNITS { elements } else { UNITS };
    (elements, width, elements.div_ceil(width))
}

/// Accumulators of a unit: some dimensions of each head.
const fn accumulators<P: Storage>(sizes: Sizes) -> usize {
    sizes.heads * spread::<P>(sizes.dim).2 * P::PACK
}
