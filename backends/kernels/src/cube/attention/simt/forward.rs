//! The forward pass of blocks of queries.

use super::super::blocks::BLOCK;
use super::super::blocks::{Block, Layout, MASKED, Rows, Sizes, Tile, block_rows, masked_score, query_block};
use super::tile::{
    LANES, NO_ROW, OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, product, store, write_tile,
};
use crate::cube::prelude::*;
use crate::prefix_groups::SPAN_FIELDS;

/// Turns products of queries and keys into scores, in place, and masks keys that a query does not see.
#[cube]
fn score(scores: &mut Array<f32>, tile: &Tile, layout: &Layout, #[comptime] own: usize, #[comptime] sizes: Sizes) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..own {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            let product = scores[comptime!(i * OTHER + j)];
            scores[comptime!(i * OTHER + j)] = masked_score(product, r, c, tile, layout, sizes);
        }
    }
}

/// One step of the online softmax, over a tile of scores, which become weights. [`LANES`] units have a row; a unit is
/// given the row's maximum and the sum of its weights so far, and returns both. `stage` gets the factors that rescale
/// the rows' accumulators: exactly 1 where the maximum stays, so that tiles of which a row sees no key change nothing.
#[cube]
fn online_softmax(
    tile: &mut Shared<[f32]>,
    stage: &mut Shared<[f32]>,
    largest: f32,
    total: f32,
    #[comptime] own: usize,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    // units beyond the last row have that row once more
    let row = min(unit / LANES, comptime!(own * SIDE - 1));
    let first = row * TILE_PITCH + lane;
    let mut top = largest;
    for c in 0..comptime!(TILE / LANES) {
        top = max(top, tile[first + c * LANES]);
    }
    stage[unit] = top;
    sync_cube();
    let mut now = top;
    for other in 0..LANES {
        now = max(now, stage[unit - lane + other]);
    }
    let mut shrunk = 1.0f32;
    if now > largest {
        shrunk = (largest - now).exp();
    }
    let mut weights = Array::<f32>::new(comptime!(TILE / LANES));
    let mut sum = 0.0f32;
    #[unroll]
    for c in 0..comptime!(TILE / LANES) {
        let score = tile[first + comptime!(c * LANES)];
        let mut weight = 0.0f32;
        if score > f32::new(MASKED * 0.5) {
            weight = (score - now).exp();
        }
        weights[c] = weight;
        sum += weight;
    }
    sync_cube();
    if unit < comptime!(own * SIDE * LANES) {
        #[unroll]
        for c in 0..comptime!(TILE / LANES) {
            tile[first + comptime!(c * LANES)] = weights[c];
        }
        if lane == 0 {
            stage[UNITS + row] = shrunk;
        }
    }
    sync_cube();
    (now, fma(total, shrunk, sum))
}

/// Adds a tile of keys and values, at `places`, to the softmax of a block's queries: `mixed` are the weighted sums of
/// values; the row's maximum and a unit's sum of weights are returned.
#[cube]
pub(crate) fn attend_tile<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    query_rows: &Rows,
    key_rows: &Rows,
    places: &Shared<[u32]>,
    stage: &mut Shared<[f32]>,
    tile: &mut Shared<[f32]>,
    mixed: &mut Array<f32>,
    pairs: &Tile,
    layout: &Layout,
    largest: f32,
    total: f32,
    #[comptime] own: usize,
    #[comptime] sizes: Sizes,
) -> (f32, f32) {
    let dim = comptime!(sizes.dim);
    let each = comptime!(dim.div_ceil(SIDE));
    let mut scores = Array::<f32>::new(comptime!(own * OTHER));
    clear(&mut scores, comptime!(own * OTHER));
    product::<F>(q, query_rows, k, key_rows, places, stage, &mut scores, own, dim);
    score(&mut scores, pairs, layout, own, sizes);
    write_tile(&mut scores, tile, own);
    sync_cube();
    let (now, sum) = online_softmax(tile, stage, largest, total, own);
    #[unroll]
    for i in 0..own {
        let shrunk = stage[UNIT_POS as usize / SIDE + comptime!(UNITS + i * SIDE)];
        #[unroll]
        for j in 0..each {
            mixed[comptime!(i * each + j)] *= shrunk;
        }
    }
    sync_cube();
    accumulate::<F>(tile, v, key_rows, places, stage, mixed, own, dim);
    (now, sum)
}

/// Ends the online softmax: divides the accumulators by the sums of weights, and writes every row's logsumexp to
/// `lse_rows`. A row that sees no key keeps its zeros.
#[cube]
pub(crate) fn finish_softmax(
    mixed: &mut Array<f32>,
    stage: &mut Shared<[f32]>,
    lse: &mut [f32],
    lse_rows: &Rows,
    largest: f32,
    total: f32,
    writes: bool,
    #[comptime] own: usize,
    #[comptime] each: usize,
) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    stage[unit] = total;
    sync_cube();
    let mut denominator = 0.0f32;
    for other in 0..LANES {
        denominator += stage[unit - lane + other];
    }
    if denominator <= 0.0f32 {
        denominator = 1.0f32;
    }
    sync_cube();
    if lane == 0 {
        let row = unit / LANES;
        stage[row] = denominator;
        if writes && row < lse_rows.count {
            lse[lse_rows.at + row * lse_rows.pitch] = largest + denominator.ln();
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..own {
        let denominator = stage[unit / SIDE + comptime!(i * SIDE)];
        #[unroll]
        for j in 0..each {
            mixed[comptime!(i * each + j)] /= denominator;
        }
    }
}

/// Lists the rows of the keys at a tile's positions, from `position` on, whatever spans they are in.
#[cube]
fn list_keys(table: &[i32], layout: &Layout, block: &Block, position: i32, places: &mut Shared<[u32]>) {
    if UNIT_POS < TILE as u32 {
        let at = position + UNIT_POS as i32;
        let mut entry = block.entry;
        while entry + 1 < block.last && at >= table[layout.spans + (entry + 1) * SPAN_FIELDS + 2] {
            entry += 1;
        }
        let span = layout.spans + entry * SPAN_FIELDS;
        let behind = at - table[span + 2];
        let mut place = u32::cast_from(NO_ROW);
        // there are none behind the last query, and before the first position that is known
        if behind >= 0 && at < block.position + block.count as i32 {
            place = (table[span] + behind) as u32;
        }
        places[UNIT_POS as usize] = place;
    }
    sync_cube();
}

/// The output and the logsumexps of a block of queries of one head. Tiles of keys begin at multiples of [`TILE`]
/// positions, so that the order of a row's sums depends on its position alone, not on where blocks and shared prefixes
/// end.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_forward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    out: &mut [F],
    lse: &mut [f32],
    table: &[i32],
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.dim);
    let each = comptime!(dim.div_ceil(SIDE));
    let mut places = Shared::<[u32]>::new_slice(TILE);
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(BLOCK * TILE_PITCH));
    let mut mixed = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut mixed, comptime!(OWN * each));
    let block = query_block(table, &layout);
    let query_rows = block_rows(&block, layout.heads, dim);
    let kv = layout.heads / layout.group;
    let key_rows = Rows { at: block.head / layout.group * dim, count: TILE, pitch: kv * dim };
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut position = max(block.position - layout.window + 1, 0) / TILE as i32 * TILE as i32;
    while position < block.position + block.count as i32 {
        list_keys(table, &layout, &block, position, &mut places);
        let pairs = Tile {
            from: block.from,
            rows: block.count,
            position: block.position,
            step: 1i32,
            row: position,
            shift: 0i32,
            count: TILE,
            head: block.head,
        };
        let (now, sum) = attend_tile::<F>(
            q,
            k,
            v,
            &query_rows,
            &key_rows,
            &places,
            &mut stage,
            &mut tile,
            &mut mixed,
            &pairs,
            &layout,
            largest,
            total,
            OWN,
            sizes,
        );
        largest = now;
        total = sum;
        position += TILE as i32;
    }
    let lse_rows = Rows { at: block.from * layout.heads + block.head, count: block.count, pitch: layout.heads };
    finish_softmax(&mut mixed, &mut stage, lse, &lse_rows, largest, total, block.writes, OWN, each);
    store::<F>(&mut mixed, out, &query_rows, block.writes, OWN, dim);
}
