//! The forward pass of blocks of queries.

use super::super::blocks::BLOCK;
use super::super::blocks::{
    Block, Layout, MASKED, Sizes, Tile, block_rows, from_row, key_rows, masked_score, query_block, tile_of,
    visible_keys,
};
use super::tile::{LANES, OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, product, store, write_tile};
use crate::cube::prelude::*;

/// Turns products of queries and keys into scores, in place, and masks keys that a query does not see.
#[cube]
fn score(scores: &mut Array<f32>, tile: &Tile, layout: &Layout, #[comptime] sizes: Sizes) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            let product = scores[comptime!(i * OTHER + j)];
            scores[comptime!(i * OTHER + j)] = masked_score(product, r, c, tile, layout, sizes);
        }
    }
}

/// One step of the online softmax, over a tile of scores, which become weights. A unit has a quarter of a row; it is
/// given the row's maximum and the sum of its own weights so far, and returns both. `stage` gets the factors that
/// rescale the rows' accumulators.
#[cube]
fn online_softmax(tile: &mut Shared<[f32]>, stage: &mut Shared<[f32]>, largest: f32, total: f32) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let lane = unit % LANES;
    let first = unit / LANES * TILE_PITCH + lane;
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
    let shrunk = (largest - now).exp();
    let mut sum = total * shrunk;
    for c in 0..comptime!(TILE / LANES) {
        let score = tile[first + c * LANES];
        let mut weight = 0.0f32;
        if score > f32::new(MASKED * 0.5) {
            weight = (score - now).exp();
        }
        tile[first + c * LANES] = weight;
        sum += weight;
    }
    if lane == 0 {
        stage[UNITS + unit / LANES] = shrunk;
    }
    sync_cube();
    (now, sum)
}

/// Ends the online softmax: divides the accumulators by the sums of weights, and writes every row's logsumexp.
#[cube]
fn finish_softmax(
    mixed: &mut Array<f32>,
    stage: &mut Shared<[f32]>,
    lse: &mut [f32],
    largest: f32,
    total: f32,
    block: &Block,
    heads: usize,
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
    sync_cube();
    if lane == 0 {
        let row = unit / LANES;
        stage[row] = denominator;
        if block.writes && row < block.count {
            lse[(block.from + row) * heads + block.head] = largest + denominator.ln();
        }
    }
    sync_cube();
    #[unroll]
    for i in 0..OWN {
        let denominator = stage[unit / SIDE + comptime!(i * SIDE)];
        #[unroll]
        for j in 0..each {
            mixed[comptime!(i * each + j)] /= denominator;
        }
    }
}

/// The output and the logsumexps of a block of queries of one head.
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
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(BLOCK * TILE_PITCH));
    let mut scores = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut mixed = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut mixed, comptime!(OWN * each));
    let block = query_block(table, &layout);
    let query_rows = block_rows(&block, layout.heads, dim);
    let mut largest = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, &layout, entry, &block);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = key_rows(&part, &block, &layout, dim, TILE);
            clear(&mut scores, comptime!(OWN * OTHER));
            product::<F>(q, &query_rows, k, &other, &mut stage, &mut scores, dim);
            let pairs = tile_of(&block, &part, other.count, block.head);
            score(&mut scores, &pairs, &layout, sizes);
            write_tile(&mut scores, &mut tile);
            sync_cube();
            let (now, sum) = online_softmax(&mut tile, &mut stage, largest, total);
            largest = now;
            total = sum;
            #[unroll]
            for i in 0..OWN {
                let shrunk = stage[UNIT_POS as usize / SIDE + comptime!(UNITS + i * SIDE)];
                #[unroll]
                for j in 0..each {
                    mixed[comptime!(i * each + j)] *= shrunk;
                }
            }
            sync_cube();
            accumulate::<F>(&mut tile, v, &other, &mut stage, &mut mixed, dim);
            row += TILE as i32;
        }
        entry += 1;
    }
    finish_softmax(&mut mixed, &mut stage, lse, largest, total, &block, layout.heads, each);
    store::<F>(&mut mixed, out, &query_rows, block.writes, dim);
}
