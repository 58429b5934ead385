//! The backward pass: dQ of blocks of queries; dK and dV of blocks of keys.

use super::super::super::cmma::{VECTOR, shared_aligned};
use super::super::blocks::BLOCK;
use super::super::blocks::{
    Layout, Sizes, Tile, block_rows, from_row, key_block, key_rows, pair_gradient, pair_of, query_block, tile_of,
    tile_rows, visible_keys, visible_queries,
};
use super::tile::{LANES, multiply_accumulate, products, stage, store, zero_sums};
use cubecl::prelude::*;

/// From products of queries and keys (`scores`) and of values and output gradients (`upstream`), the probabilities P
/// and the gradients dS of the former; both are 0 where a key is masked. `numbers` has every query's logsumexp and Δ. A
/// block of queries needs no P.
#[cube]
fn score_gradients<F: Float>(
    scores: &Shared<[f32]>,
    upstream: &Shared<[f32]>,
    probabilities: &mut Shared<[F]>,
    slopes: &mut Shared<[F]>,
    numbers: &[f32],
    tile: &Tile,
    layout: &Layout,
    #[comptime] block_of_queries: bool,
    #[comptime] sizes: Sizes,
) {
    let unit = UNIT_POS as usize;
    let (r, lane) = (unit / LANES, unit % LANES);
    for i in 0..comptime!(sizes.tile() / LANES) {
        let c = lane + i * LANES;
        let (seen, at) = pair_of(r, c, tile, layout, block_of_queries);
        let mut p = 0.0f32;
        let mut d = 0.0f32;
        if seen {
            let from = r * comptime!(sizes.score_pitch()) + c;
            let (probability, slope) = pair_gradient(scores[from], upstream[from], numbers, at, layout, sizes);
            p = probability;
            d = slope;
        }
        let to = r * comptime!(sizes.weight_pitch()) + c;
        if !block_of_queries {
            probabilities[to] = F::cast_from(p);
        }
        slopes[to] = F::cast_from(d);
    }
}

/// dQ of a block of queries of one head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn query_backward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    gradient: &[Vector<F, N>],
    numbers: &[f32],
    d_q: &mut [F],
    table: &[i32],
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut queries_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut gradients_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut keys_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut values_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut scores = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut upstream = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut slopes = shared_aligned::<F>(comptime!(sizes.weights()));
    let mut nothing = Shared::<[F]>::new_slice(1usize);
    let no_factors = Shared::<[f32]>::new_slice(1usize);
    let mut sums = zero_sums(sizes);
    let block = query_block(table, &layout);
    let (wide, height) = comptime!((sizes.dim / VECTOR, sizes.tile()));
    let query_rows = block_rows(&block, layout.heads, wide);
    stage(q, &query_rows, &mut queries_staged, BLOCK, sizes);
    stage(gradient, &query_rows, &mut gradients_staged, BLOCK, sizes);
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, &layout, entry, &block);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = key_rows(&part, &block, &layout, wide, height);
            stage(k, &other, &mut keys_staged, height, sizes);
            stage(v, &other, &mut values_staged, height, sizes);
            sync_cube();
            products(&queries_staged, &keys_staged, &mut scores, sizes);
            products(&gradients_staged, &values_staged, &mut upstream, sizes);
            sync_cube();
            let tile = tile_of(&block, &part, other.count, block.head);
            score_gradients(&scores, &upstream, &mut nothing, &mut slopes, numbers, &tile, &layout, true, sizes);
            sync_cube();
            multiply_accumulate(&slopes, &keys_staged, &mut sums, sizes);
            sync_cube();
            row += comptime!(height as i32);
        }
        entry += 1;
    }
    let rows = block_rows(&block, layout.heads, comptime!(sizes.dim));
    store(&sums, &mut scores, &no_factors, d_q, &rows, block.writes, false, sizes);
}

/// dK and dV of a block of keys of one key head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn key_value_backward<F: Float, N: Size>(
    q: &[Vector<F, N>],
    k: &[Vector<F, N>],
    v: &[Vector<F, N>],
    gradient: &[Vector<F, N>],
    numbers: &[f32],
    d_k: &mut [F],
    d_v: &mut [F],
    table: &[i32],
    layout: Layout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut keys_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut values_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut queries_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut gradients_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut scores = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut upstream = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut probabilities = shared_aligned::<F>(comptime!(sizes.weights()));
    let mut slopes = shared_aligned::<F>(comptime!(sizes.weights()));
    let no_factors = Shared::<[f32]>::new_slice(1usize);
    let mut key_sums = zero_sums(sizes);
    let mut value_sums = zero_sums(sizes);
    let block = key_block(table, &layout);
    let kv_heads = layout.heads / layout.group;
    let (wide, height) = comptime!((sizes.dim / VECTOR, sizes.tile()));
    let key_block_rows = block_rows(&block, kv_heads, wide);
    stage(k, &key_block_rows, &mut keys_staged, BLOCK, sizes);
    stage(v, &key_block_rows, &mut values_staged, BLOCK, sizes);
    let mut entry = block.entry;
    while entry < block.last {
        let queries = visible_queries(table, &layout, entry, &block);
        let mut head = block.head * layout.group;
        while head < (block.head + 1) * layout.group {
            let mut row = queries.row;
            while row < queries.end {
                let part = from_row(&queries, row);
                let other = tile_rows(&part, layout.heads, head, wide, height);
                stage(q, &other, &mut queries_staged, height, sizes);
                stage(gradient, &other, &mut gradients_staged, height, sizes);
                sync_cube();
                products(&keys_staged, &queries_staged, &mut scores, sizes);
                products(&values_staged, &gradients_staged, &mut upstream, sizes);
                sync_cube();
                let tile = tile_of(&block, &part, other.count, head);
                score_gradients(
                    &scores,
                    &upstream,
                    &mut probabilities,
                    &mut slopes,
                    numbers,
                    &tile,
                    &layout,
                    false,
                    sizes,
                );
                sync_cube();
                multiply_accumulate(&probabilities, &gradients_staged, &mut value_sums, sizes);
                multiply_accumulate(&slopes, &queries_staged, &mut key_sums, sizes);
                sync_cube();
                row += comptime!(height as i32);
            }
            head += 1;
        }
        entry += 1;
    }
    let rows = block_rows(&block, kv_heads, comptime!(sizes.dim));
    store(&key_sums, &mut scores, &no_factors, d_k, &rows, block.writes, false, sizes);
    store(&value_sums, &mut scores, &no_factors, d_v, &rows, block.writes, false, sizes);
}
