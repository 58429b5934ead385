//! Gradients of blocks of queries, and of blocks of keys and their values.

use super::super::blocks::{
    Block, Part, Rows, Scoring, block_of, from_row, keys_of, next_rows, own_rows, queries_of,
    scored, sees,
};
use super::tile::{
    OTHER, OWN, SIDE, STAGE, TILE, TILE_PITCH, accumulate, clear, product, spread, store,
};
use crate::kernels::families::{BLOCK, BLOCK_FIELDS, SPAN_FIELDS};
use burn_cubecl::cubecl;
use cubecl::prelude::*;

/// Products of queries and keys become probabilities, and products of values and gradients become the gradients of those products;
/// both are zeros where a query does not see a key. `numbers` has the logsumexp of every query, and its Σ.
#[cube]
fn differentiate(
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
            let mut seen = sees(other, own, scoring.window);
            let mut row = part.row as usize + c;
            if block_of_queries {
                seen = sees(own, other, scoring.window);
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

#[cube(launch, address_type = "dynamic")]
pub(crate) fn differentiate_queries<F: Float>(
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
    let own = own_rows(&block, heads, head, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let keys = keys_of(table, spans + entry * SPAN_FIELDS, &block, window);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = next_rows(&part, heads / group, head / group, dim, TILE);
            clear(&mut scores, comptime!(OWN * OTHER));
            clear(&mut upstream, comptime!(OWN * OTHER));
            product::<F>(q, &own, k, &other, &mut stage, &mut scores, dim);
            product::<F>(gradient, &own, v, &other, &mut stage, &mut upstream, dim);
            differentiate(
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
            spread(&mut upstream, &mut tile);
            accumulate::<F>(&mut tile, k, &other, &mut stage, &mut sums, dim);
            row += TILE as i32;
        }
        entry += 1;
    }
    store::<F>(&mut sums, d_q, &own, writes, dim);
}

/// What one query head adds to the gradients of a block of keys and their values.
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
        let other = next_rows(&part, heads, head, dim, TILE);
        clear(&mut scores, comptime!(OWN * OTHER));
        clear(&mut upstream, comptime!(OWN * OTHER));
        product::<F>(k, own, q, &other, stage, &mut scores, dim);
        product::<F>(v, own, gradient, &other, stage, &mut upstream, dim);
        differentiate(
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
        spread(&mut scores, tile);
        accumulate::<F>(tile, gradient, &other, stage, value_sums, dim);
        spread(&mut upstream, tile);
        accumulate::<F>(tile, q, &other, stage, key_sums, dim);
        row += TILE as i32;
    }
}

#[cube(launch, address_type = "dynamic")]
pub(crate) fn differentiate_keys<F: Float>(
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
    let own = own_rows(&block, kv, kv_head, dim);
    let mut entry = block.entry;
    while entry < block.last {
        let queries = queries_of(table, spans + entry * SPAN_FIELDS, &block, window);
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
