//! The backward pass: dQ of blocks of queries; dK and dV of blocks of keys.

use super::super::blocks::BLOCK;
use super::super::blocks::{
    Layout, Sizes, Tile, block_rows, from_row, key_block, key_rows, pair_gradient, pair_of, query_block, tile_of,
    tile_rows, visible_keys, visible_queries,
};
use super::tile::{
    OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, list_rows, product, store, write_tile,
};
use cubecl::prelude::*;

/// Turns products of queries and keys (`scores`) into probabilities P, and products of values and output gradients
/// (`upstream`) into the gradients dS of the former, in place; both are 0 where a key is masked. `numbers` has every
/// query's logsumexp and Δ.
#[cube]
fn score_gradients(
    scores: &mut Array<f32>,
    upstream: &mut Array<f32>,
    numbers: &[f32],
    tile: &Tile,
    layout: &Layout,
    #[comptime] block_of_queries: bool,
    #[comptime] sizes: Sizes,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OTHER {
            let index = comptime!(i * OTHER + j);
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            let (seen, at) = pair_of(r, c, tile, layout, block_of_queries);
            let mut p = 0.0f32;
            let mut d = 0.0f32;
            if seen {
                let (probability, slope) = pair_gradient(scores[index], upstream[index], numbers, at, layout, sizes);
                p = probability;
                d = slope;
            }
            scores[index] = p;
            upstream[index] = d;
        }
    }
}

/// dQ of a block of queries of one head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn query_backward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    gradient: &[F],
    numbers: &[f32],
    d_q: &mut [F],
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
    let mut scores = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut upstream = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut sums = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut sums, comptime!(OWN * each));
    let block = query_block(table, &layout);
    let query_rows = block_rows(&block, layout.heads, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, &layout, entry, &block);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = key_rows(&part, &block, &layout, dim, TILE);
            list_rows(&mut places, other.count);
            clear(&mut scores, comptime!(OWN * OTHER));
            clear(&mut upstream, comptime!(OWN * OTHER));
            product::<F>(q, &query_rows, k, &other, &places, &mut stage, &mut scores, OWN, dim);
            product::<F>(gradient, &query_rows, v, &other, &places, &mut stage, &mut upstream, OWN, dim);
            let pairs = tile_of(&block, &part, other.count, block.head);
            score_gradients(&mut scores, &mut upstream, numbers, &pairs, &layout, true, sizes);
            write_tile(&mut upstream, &mut tile, OWN);
            accumulate::<F>(&mut tile, k, &other, &places, &mut stage, &mut sums, OWN, dim);
            row += TILE as i32;
        }
        entry += 1;
    }
    store::<F>(&mut sums, d_q, &query_rows, block.writes, OWN, dim);
}

/// dK and dV of a block of keys of one key head.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn key_value_backward<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    gradient: &[F],
    numbers: &[f32],
    d_k: &mut [F],
    d_v: &mut [F],
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
    let mut scores = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut upstream = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut key_sums = Array::<f32>::new(comptime!(OWN * each));
    let mut value_sums = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut key_sums, comptime!(OWN * each));
    clear(&mut value_sums, comptime!(OWN * each));
    let block = key_block(table, &layout);
    let key_block_rows = block_rows(&block, layout.heads / layout.group, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let queries = visible_queries(table, &layout, entry, &block);
        let mut head = block.head * layout.group;
        while head < block.head * layout.group + layout.group {
            let mut row = queries.row;
            while row < queries.end {
                let part = from_row(&queries, row);
                let other = tile_rows(&part, layout.heads, head, dim, TILE);
                list_rows(&mut places, other.count);
                clear(&mut scores, comptime!(OWN * OTHER));
                clear(&mut upstream, comptime!(OWN * OTHER));
                product::<F>(k, &key_block_rows, q, &other, &places, &mut stage, &mut scores, OWN, dim);
                product::<F>(v, &key_block_rows, gradient, &other, &places, &mut stage, &mut upstream, OWN, dim);
                let pairs = tile_of(&block, &part, other.count, head);
                score_gradients(&mut scores, &mut upstream, numbers, &pairs, &layout, false, sizes);
                write_tile(&mut scores, &mut tile, OWN);
                accumulate::<F>(&mut tile, gradient, &other, &places, &mut stage, &mut value_sums, OWN, dim);
                write_tile(&mut upstream, &mut tile, OWN);
                accumulate::<F>(&mut tile, q, &other, &places, &mut stage, &mut key_sums, OWN, dim);
                row += TILE as i32;
            }
            head += 1;
        }
        entry += 1;
    }
    store::<F>(&mut key_sums, d_k, &key_block_rows, block.writes, OWN, dim);
    store::<F>(&mut value_sums, d_v, &key_block_rows, block.writes, OWN, dim);
}
