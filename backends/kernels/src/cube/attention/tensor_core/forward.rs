//! The forward pass of blocks of queries.

use super::super::super::cmma::{VECTOR, shared_aligned};
use super::super::blocks::BLOCK;
use super::super::blocks::{
    Block, Layout, MASKED, Sizes, Tile, block_rows, from_row, key_rows, masked_score, query_block, tile_of,
    visible_keys,
};
use super::tile::{LANES, load_sums, multiply_accumulate, products, stage, store, store_sums, zero_sums};
use cubecl::cmma::Matrix;
use cubecl::prelude::*;

/// Distance by which a row's maximum may exceed the reference score of its weights before accumulators are rescaled
/// (lazy rescaling, as in `FlashAttention` 4). Weights of e⁸ fit in every half precision, and scores rarely grow by as
/// much after the first tiles.
const SLACK: f32 = 8.0;

/// Turns the products of a tile into scores, in place, and masks keys that a query does not see. Returns the maximum of
/// a unit's part of its row.
#[cube]
fn score(scores: &mut Shared<[f32]>, tile: &Tile, layout: &Layout, #[comptime] sizes: Sizes) -> f32 {
    let unit = UNIT_POS as usize;
    let (row, lane) = (unit / LANES, unit % LANES);
    let first = row * comptime!(sizes.score_pitch()) + lane;
    let mut top = f32::new(MASKED);
    for i in 0..comptime!(sizes.tile() / LANES) {
        let column = lane + i * LANES;
        let z = masked_score(scores[first + i * LANES], row, column, tile, layout, sizes);
        scores[first + i * LANES] = z;
        top = max(top, z);
    }
    top
}

/// One step of the online softmax: turns scores into weights. A unit is given the reference score of its row (`before`)
/// and the sum of its own weights so far, and returns both. `factors` gets each row's factor for the accumulators, and
/// `moved` whether any is not 1.
#[cube]
fn online_softmax<F: Float>(
    scores: &Shared<[f32]>,
    weights: &mut Shared<[F]>,
    tops: &Shared<[f32]>,
    factors: &mut Shared<[f32]>,
    moved: &mut Shared<[u32]>,
    before: f32,
    weighed: f32,
    #[comptime] sizes: Sizes,
) -> (f32, f32) {
    let unit = UNIT_POS as usize;
    let (row, lane) = (unit / LANES, unit % LANES);
    let mut top = tops[unit];
    for other in 0..LANES {
        top = max(top, tops[unit - lane + other]);
    }
    let mut reference = before;
    let mut factor = 1.0f32;
    if top > reference + SLACK {
        factor = (reference - top).exp();
        reference = top;
        // accumulators of a row that has seen no key are 0
        if before > f32::new(MASKED * 0.5) {
            moved[0] = 1u32;
        }
    }
    if lane == 0 {
        factors[row] = factor;
    }
    let mut total = weighed * factor;
    for i in 0..comptime!(sizes.tile() / LANES) {
        let column = lane + i * LANES;
        let z = scores[row * comptime!(sizes.score_pitch()) + column];
        let mut weight = 0.0f32;
        if z > f32::new(MASKED * 0.5) {
            weight = (z - reference).exp();
        }
        weights[row * comptime!(sizes.weight_pitch()) + column] = F::cast_from(weight);
        total += weight;
    }
    (reference, total)
}

/// Multiplies the accumulators of each row by its factor, through `scores`, whose contents are no longer needed.
#[cube]
fn rescale(
    sums: &mut Sequence<Matrix<f32>>,
    scores: &mut Shared<[f32]>,
    factors: &Shared<[f32]>,
    #[comptime] sizes: Sizes,
) {
    let unit = UNIT_POS as usize;
    let (row, lane) = (unit / LANES, unit % LANES);
    #[unroll]
    for part in 0..comptime!(sizes.parts()) {
        store_sums(&*sums, scores, part, sizes);
        sync_cube();
        for i in 0..comptime!(sizes.tile() / LANES) {
            scores[row * comptime!(sizes.score_pitch()) + lane + i * LANES] *= factors[row];
        }
        sync_cube();
        load_sums(sums, &*scores, part, sizes);
        sync_cube();
    }
}

/// Ends the online softmax: writes every row's logsumexp, and sets `factors` to the reciprocals of the sums of weights.
#[cube]
fn finish_softmax(
    tops: &mut Shared<[f32]>,
    factors: &mut Shared<[f32]>,
    lse: &mut [f32],
    reference: f32,
    total: f32,
    block: &Block,
    heads: usize,
) {
    let unit = UNIT_POS as usize;
    let (row, lane) = (unit / LANES, unit % LANES);
    tops[unit] = total;
    sync_cube();
    if lane == 0 {
        let mut sum_of_weights = 0.0f32;
        for other in 0..LANES {
            sum_of_weights += tops[unit + other];
        }
        factors[row] = 1.0f32 / sum_of_weights;
        if block.writes && row < block.count {
            lse[(block.from + row) * heads + block.head] = reference + sum_of_weights.ln();
        }
    }
}

/// The output and the logsumexps of a block of queries of one head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn attention_forward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    out: &mut [F],
    lse: &mut [f32],
    table: &[i32],
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut queries_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut keys_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut values_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut scores = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut weights = shared_aligned::<F>(comptime!(sizes.weights()));
    let mut tops = Shared::<[f32]>::new_slice(comptime!(BLOCK * LANES));
    let mut factors = Shared::<[f32]>::new_slice(BLOCK);
    let mut moved = Shared::<[u32]>::new_slice(1usize);
    let mut sums = zero_sums(sizes);
    let block = query_block(table, &layout);
    let (wide, height) = comptime!((sizes.dim / VECTOR, sizes.tile()));
    let queries = block_rows(&block, layout.heads, wide);
    stage(q, &queries, &mut queries_staged, BLOCK, sizes);
    let mut reference = f32::new(MASKED);
    let mut total = 0.0f32;
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, &layout, entry, &block);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = key_rows(&part, &block, &layout, wide, height);
            stage(k, &other, &mut keys_staged, height, sizes);
            stage(v, &other, &mut values_staged, height, sizes);
            if UNIT_POS == 0 {
                moved[0] = 0u32;
            }
            sync_cube();
            products(&queries_staged, &keys_staged, &mut scores, sizes);
            sync_cube();
            let tile = tile_of(&block, &part, other.count, block.head);
            tops[UNIT_POS as usize] = score(&mut scores, &tile, &layout, sizes);
            sync_cube();
            let (now, sum) =
                online_softmax(&scores, &mut weights, &tops, &mut factors, &mut moved, reference, total, sizes);
            reference = now;
            total = sum;
            sync_cube();
            if moved[0] == 1u32 {
                rescale(&mut sums, &mut scores, &factors, sizes);
            }
            multiply_accumulate(&weights, &values_staged, &mut sums, sizes);
            sync_cube();
            row += comptime!(height as i32);
        }
        entry += 1;
    }
    finish_softmax(&mut tops, &mut factors, lse, reference, total, &block, layout.heads);
    let rows = block_rows(&block, layout.heads, comptime!(sizes.dim));
    store(&sums, &mut scores, &factors, out, &rows, block.writes, true, sizes);
}
