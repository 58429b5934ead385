//! The backward pass: dQ of blocks of queries; dK and dV of blocks of keys.

use super::super::blocks::{
    Block, Part, Rows, Scoring, block_of, block_rows, from_row, is_visible, scored, tile_rows, visible_keys,
    visible_queries,
};
use super::tile::{OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, product, store, write_tile};
use crate::families::{BLOCK, BLOCK_FIELDS, SPAN_FIELDS};
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Turns products of queries and keys (`scores`) into probabilities P, and products of values and output gradients
/// (`upstream`) into the gradients dS of the former, in place; both are 0 where a key is masked. `numbers` has every
/// query's logsumexp and Δ.
#[cube]
fn score_gradients(
    scores: &mut Array<f32>,
    upstream: &mut Array<f32>,
    numbers: &[f32],
    heads: usize,
    head: usize,
    block: &Block,
    part: &Part,
    count: usize,
    scoring: &Scoring,
    #[comptime] capped: bool,
    #[comptime] block_of_queries: bool,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..OWN {
        #[unroll]
        for j in 0..OTHER {
            let r = unit / SIDE + comptime!(i * SIDE);
            let c = unit % SIDE + comptime!(j * SIDE);
            let own = block.position + r as i32;
            let other = part.row + part.shift + c as i32;
            let mut seen = is_visible(other, own, scoring.window);
            let mut row = part.row as usize + c;
            if block_of_queries {
                seen = is_visible(own, other, scoring.window);
                row = block.from + r;
            }
            let mut p = 0.0f32;
            let mut d = 0.0f32;
            if r < block.count && c < count && seen {
                let at = (row * heads + head) * 2;
                let (z, slope) = scored(scores[comptime!(i * OTHER + j)], scoring, capped);
                p = (z - numbers[at]).exp();
                d = p * (upstream[comptime!(i * OTHER + j)] - numbers[at + 1]) * slope;
            }
            scores[comptime!(i * OTHER + j)] = p;
            upstream[comptime!(i * OTHER + j)] = d;
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
    blocks: usize,
    spans: usize,
    heads: usize,
    group: usize,
    window: i32,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let each = comptime!(dim.div_ceil(SIDE));
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(BLOCK * TILE_PITCH));
    let mut scores = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut upstream = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut sums = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut sums, comptime!(OWN * each));
    let scoring = Scoring { window, scale, cap };
    let block = block_of(table, min(CUBE_POS / heads, blocks - 1) * BLOCK_FIELDS);
    let head = CUBE_POS % heads;
    let writes = CUBE_POS < blocks * heads;
    let own = block_rows(&block, heads, head, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, spans + entry * SPAN_FIELDS, &block, window);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = tile_rows(&part, heads / group, head / group, dim, TILE);
            clear(&mut scores, comptime!(OWN * OTHER));
            clear(&mut upstream, comptime!(OWN * OTHER));
            product::<F>(q, &own, k, &other, &mut stage, &mut scores, dim);
            product::<F>(gradient, &own, v, &other, &mut stage, &mut upstream, dim);
            score_gradients(
                &mut scores,
                &mut upstream,
                numbers,
                heads,
                head,
                &block,
                &part,
                other.count,
                &scoring,
                capped,
                true,
            );
            write_tile(&mut upstream, &mut tile);
            accumulate::<F>(&mut tile, k, &other, &mut stage, &mut sums, dim);
            row += TILE as i32;
        }
        entry += 1;
    }
    store::<F>(&mut sums, d_q, &own, writes, dim);
}

/// Adds one query head's contribution to dK and dV of a block of keys.
#[cube]
fn add_head<F: Float>(
    q: &[F],
    k: &[F],
    v: &[F],
    gradient: &[F],
    numbers: &[f32],
    stage: &mut Shared<[f32]>,
    tile: &mut Shared<[f32]>,
    key_sums: &mut Array<f32>,
    value_sums: &mut Array<f32>,
    own: &Rows,
    block: &Block,
    queries: &Part,
    heads: usize,
    head: usize,
    scoring: &Scoring,
    #[comptime] capped: bool,
    #[comptime] dim: usize,
) {
    let mut scores = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut upstream = Array::<f32>::new(comptime!(OWN * OTHER));
    let mut row = queries.row;
    while row < queries.end {
        let part = from_row(queries, row);
        let other = tile_rows(&part, heads, head, dim, TILE);
        clear(&mut scores, comptime!(OWN * OTHER));
        clear(&mut upstream, comptime!(OWN * OTHER));
        product::<F>(k, own, q, &other, stage, &mut scores, dim);
        product::<F>(v, own, gradient, &other, stage, &mut upstream, dim);
        score_gradients(
            &mut scores,
            &mut upstream,
            numbers,
            heads,
            head,
            block,
            &part,
            other.count,
            scoring,
            capped,
            false,
        );
        write_tile(&mut scores, tile);
        accumulate::<F>(tile, gradient, &other, stage, value_sums, dim);
        write_tile(&mut upstream, tile);
        accumulate::<F>(tile, q, &other, stage, key_sums, dim);
        row += TILE as i32;
    }
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
    blocks: usize,
    first_block: usize,
    spans: usize,
    heads: usize,
    group: usize,
    window: i32,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let each = comptime!(dim.div_ceil(SIDE));
    let mut stage = Shared::<[f32]>::new_slice(STAGE);
    let mut tile = Shared::<[f32]>::new_slice(comptime!(BLOCK * TILE_PITCH));
    let mut key_sums = Array::<f32>::new(comptime!(OWN * each));
    let mut value_sums = Array::<f32>::new(comptime!(OWN * each));
    clear(&mut key_sums, comptime!(OWN * each));
    clear(&mut value_sums, comptime!(OWN * each));
    let scoring = Scoring { window, scale, cap };
    let kv = heads / group;
    let at = first_block + min(CUBE_POS / kv, blocks - 1) * BLOCK_FIELDS;
    let block = block_of(table, at);
    let kv_head = CUBE_POS % kv;
    let writes = CUBE_POS < blocks * kv;
    let own = block_rows(&block, kv, kv_head, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let queries = visible_queries(table, spans + entry * SPAN_FIELDS, &block, window);
        let mut head = kv_head * group;
        while head < kv_head * group + group {
            add_head::<F>(
                q,
                k,
                v,
                gradient,
                numbers,
                &mut stage,
                &mut tile,
                &mut key_sums,
                &mut value_sums,
                &own,
                &block,
                &queries,
                heads,
                head,
                &scoring,
                capped,
                dim,
            );
            head += 1;
        }
        entry += 1;
    }
    store::<F>(&mut key_sums, d_k, &own, writes, dim);
    store::<F>(&mut value_sums, d_v, &own, writes, dim);
}
