//! The backward pass: dQ of blocks of queries; dK and dV of blocks of keys.

use super::super::super::cmma::{VECTOR, shared_aligned};
use super::super::blocks::{
    Block, Part, Scoring, block_of, block_rows, from_row, is_visible, scored, tile_rows, visible_keys, visible_queries,
};
use super::tile::{LANES, Sizes, multiply_accumulate, products, stage, store, zero_sums};
use crate::families::{BLOCK, BLOCK_FIELDS, SPAN_FIELDS};
use burn_cubecl::cubecl;
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
    heads: usize,
    head: usize,
    block: &Block,
    part: &Part,
    count: usize,
    scoring: &Scoring,
    #[comptime] capped: bool,
    #[comptime] block_of_queries: bool,
    #[comptime] sizes: Sizes,
) {
    let unit = UNIT_POS as usize;
    let (r, lane) = (unit / LANES, unit % LANES);
    for i in 0..comptime!(sizes.tile() / LANES) {
        let c = lane + i * LANES;
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
            let from = r * comptime!(sizes.score_pitch()) + c;
            let (z, slope) = scored(scores[from], scoring, capped);
            p = (z - numbers[at]).exp();
            d = p * (upstream[from] - numbers[at + 1]) * slope;
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
    blocks: usize,
    spans: usize,
    heads: usize,
    group: usize,
    window: i32,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut own_queries = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut own_gradients = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut keys_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut values_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut scores = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut upstream = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut slopes = shared_aligned::<F>(comptime!(sizes.weights()));
    let mut nothing = Shared::<[F]>::new_slice(1usize);
    let no_factors = Shared::<[f32]>::new_slice(1usize);
    let mut sums = zero_sums(sizes);
    let scoring = Scoring { window, scale, cap };
    let block = block_of(table, min(CUBE_POS / heads, blocks - 1) * BLOCK_FIELDS);
    let head = CUBE_POS % heads;
    let wide = comptime!(sizes.dim / VECTOR);
    let own = block_rows(&block, heads, head, wide);
    stage(q, &own, &mut own_queries, BLOCK, sizes);
    stage(gradient, &own, &mut own_gradients, BLOCK, sizes);
    let mut entry = block.entry;
    while entry < block.last {
        let keys = visible_keys(table, spans + entry * SPAN_FIELDS, &block, window);
        let mut row = keys.row;
        while row < keys.end {
            let part = from_row(&keys, row);
            let other = tile_rows(&part, heads / group, head / group, wide, comptime!(sizes.tile()));
            stage(k, &other, &mut keys_staged, comptime!(sizes.tile()), sizes);
            stage(v, &other, &mut values_staged, comptime!(sizes.tile()), sizes);
            sync_cube();
            products(&own_queries, &keys_staged, &mut scores, sizes);
            products(&own_gradients, &values_staged, &mut upstream, sizes);
            sync_cube();
            score_gradients(
                &scores,
                &upstream,
                &mut nothing,
                &mut slopes,
                numbers,
                heads,
                head,
                &block,
                &part,
                other.count,
                &scoring,
                capped,
                true,
                sizes,
            );
            sync_cube();
            multiply_accumulate(&slopes, &keys_staged, &mut sums, sizes);
            sync_cube();
            row += comptime!(sizes.tile() as i32);
        }
        entry += 1;
    }
    let rows = block_rows(&block, heads, head, comptime!(sizes.dim));
    let writes = CUBE_POS < blocks * heads;
    store(&sums, &mut scores, &no_factors, d_q, &rows, writes, false, sizes);
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
    blocks: usize,
    keys: usize,
    spans: usize,
    heads: usize,
    group: usize,
    window: i32,
    scale: f32,
    cap: f32,
    #[comptime] capped: bool,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let mut own_keys = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut own_values = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(BLOCK)));
    let mut queries_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut gradients_staged = shared_aligned::<Vector<F, N>>(comptime!(sizes.staged(sizes.tile())));
    let mut scores = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut upstream = shared_aligned::<f32>(comptime!(sizes.scores()));
    let mut probabilities = shared_aligned::<F>(comptime!(sizes.weights()));
    let mut slopes = shared_aligned::<F>(comptime!(sizes.weights()));
    let no_factors = Shared::<[f32]>::new_slice(1usize);
    let mut key_sums = zero_sums(sizes);
    let mut value_sums = zero_sums(sizes);
    let scoring = Scoring { window, scale, cap };
    let kv_heads = heads / group;
    let block = block_of(table, keys + min(CUBE_POS / kv_heads, blocks - 1) * BLOCK_FIELDS);
    let kv_head = CUBE_POS % kv_heads;
    let wide = comptime!(sizes.dim / VECTOR);
    let own = block_rows(&block, kv_heads, kv_head, wide);
    stage(k, &own, &mut own_keys, BLOCK, sizes);
    stage(v, &own, &mut own_values, BLOCK, sizes);
    let mut entry = block.entry;
    while entry < block.last {
        let queries = visible_queries(table, spans + entry * SPAN_FIELDS, &block, window);
        let mut head = kv_head * group;
        while head < (kv_head + 1) * group {
            let mut row = queries.row;
            while row < queries.end {
                let part = from_row(&queries, row);
                let other = tile_rows(&part, heads, head, wide, comptime!(sizes.tile()));
                stage(q, &other, &mut queries_staged, comptime!(sizes.tile()), sizes);
                stage(gradient, &other, &mut gradients_staged, comptime!(sizes.tile()), sizes);
                sync_cube();
                products(&own_keys, &queries_staged, &mut scores, sizes);
                products(&own_values, &gradients_staged, &mut upstream, sizes);
                sync_cube();
                score_gradients(
                    &scores,
                    &upstream,
                    &mut probabilities,
                    &mut slopes,
                    numbers,
                    heads,
                    head,
                    &block,
                    &part,
                    other.count,
                    &scoring,
                    capped,
                    false,
                    sizes,
                );
                sync_cube();
                multiply_accumulate(&probabilities, &gradients_staged, &mut value_sums, sizes);
                multiply_accumulate(&slopes, &queries_staged, &mut key_sums, sizes);
                sync_cube();
                row += comptime!(sizes.tile() as i32);
            }
            head += 1;
        }
        entry += 1;
    }
    let rows = block_rows(&block, kv_heads, kv_head, comptime!(sizes.dim));
    let writes = CUBE_POS < blocks * kv_heads;
    store(&key_sums, &mut scores, &no_factors, d_k, &rows, writes, false, sizes);
    store(&value_sums, &mut scores, &no_factors, d_v, &rows, writes, false, sizes);
}
