//! Gradients of queries and keys of a chunk, given the states and gradients at its ends. A unit has a row of a value
//! head's state. Forward and back are kernels of their own: one of both takes longer to compile than two of half its
//! size.

use super::sizes::{PARTS, Sizes};
use super::tile::{RuleLayout, clear, load_keys, place_of, total};
use crate::cube::prelude::*;
use crate::delta::CHUNK_FIELDS;

/// A unit's row of a value head's state, in a chunk.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
struct Part {
    start: usize,
    end: usize,
    head: usize,
    row: usize,
    /// True if there is such a row.
    writes: bool,
}

#[cube]
fn part_of(table: &[i32], layout: &RuleLayout, task: usize, known: bool, #[comptime] sizes: Sizes) -> Part {
    let at = layout.chunks_at + task / layout.values * CHUNK_FIELDS;
    Part {
        start: table[at] as usize,
        end: table[at + 1] as usize,
        head: task % layout.values,
        row: min(UNIT_POS as usize, comptime!(sizes.key_dim - 1)),
        writes: known && (UNIT_POS as usize) < comptime!(sizes.key_dim),
    }
}

/// The row that starts there.
#[cube]
fn load_row(states: &[f32], first: usize, #[comptime] width: usize) -> Array<f32> {
    let mut row = Array::<f32>::new(width);
    #[unroll]
    for j in 0..width {
        row[j] = states[first + j];
    }
    row
}

/// The sum of the products of a row and the one that starts there.
#[cube]
fn product(state: &Array<f32>, states: &[f32], first: usize, #[comptime] width: usize) -> f32 {
    let mut sum = 0.0f32;
    #[unroll]
    for j in 0..width {
        sum += states[first + j] * state[j];
    }
    sum
}

/// Copies of some tokens of a value head: the output's gradient, β u and β dδ.
#[cube]
fn load_values(
    d_out: &[f32],
    beta: &[f32],
    vectors: &[f32],
    layout: &RuleLayout,
    row: usize,
    count: usize,
    head: usize,
    stage: &mut Shared<[f32]>,
    #[comptime] width: usize,
    #[comptime] units: usize,
) {
    let mut i = UNIT_POS as usize;
    while i < count * width {
        let token = i / width;
        let entry = (row + token) * layout.values + head;
        let from = entry * width + i % width;
        let to = token * comptime!(3 * width) + i % width;
        stage[to] = d_out[from];
        stage[to + width] = beta[entry] * vectors[from];
        stage[to + comptime!(2 * width)] = beta[entry] * vectors[layout.vectors_at + from];
        i += units;
    }
    sync_cube();
}

/// A row of S after a token, given that before; gives the row's parts of dq and of dk. `at` is where the token's
/// vectors are.
#[cube]
fn step(
    state: &mut Array<f32>,
    stage: &Shared<[f32]>,
    at: usize,
    decay: f32,
    key: f32,
    #[comptime] width: usize,
) -> (f32, f32) {
    let mut read = Array::<f32>::new(4usize);
    let mut pulled = Array::<f32>::new(4usize);
    clear(&mut read, 4usize);
    clear(&mut pulled, 4usize);
    #[unroll]
    for j in 0..width {
        let decayed = state[j] * decay;
        pulled[comptime!(j % 4)] += decayed * stage[at + comptime!(2 * width + j)];
        let s = decayed + key * stage[at + comptime!(width + j)];
        state[j] = s;
        read[comptime!(j % 4)] += s * stage[at + j];
    }
    (total(&read), -total(&pulled))
}

/// A row of dS before a token, given that after; gives the row's other part of dk.
#[cube]
fn step_back(
    d_state: &mut Array<f32>,
    stage: &Shared<[f32]>,
    at: usize,
    decay: f32,
    query: f32,
    key: f32,
    #[comptime] width: usize,
) -> f32 {
    let mut sums = Array::<f32>::new(4usize);
    clear(&mut sums, 4usize);
    #[unroll]
    for j in 0..width {
        let d = d_state[j] + query * stage[at + j];
        sums[comptime!(j % 4)] += d * stage[at + comptime!(width + j)];
        d_state[j] = (d - key * stage[at + comptime!(2 * width + j)]) * decay;
    }
    total(&sums)
}

/// Gradients of the normed queries and keys that a value head reads, `[rows, values, 2, key_dim]`, and behind them,
/// `[chunks, values]`, the sum of products of the state after a chunk and its gradient. A cube has a value head of a
/// chunk. Forward writes these, and then back adds what keys get of what comes later.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn delta_rule_chunks<F: Float>(
    qkv: &[F],
    g: &[f32],
    beta: &[f32],
    d_out: &[f32],
    table: &[i32],
    vectors: &[f32],
    states: &[f32],
    d_qk: &mut [f32],
    layout: RuleLayout,
    #[comptime] back: bool,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let (dim, width) = comptime!((sizes.key_dim, sizes.value_dim));
    let (tile, units) = comptime!((sizes.chunk_tile(), sizes.row_units()));
    let mut stage = Shared::<[f32]>::new_slice(comptime!(2 * tile * dim));
    let mut norms = Shared::<[f32]>::new_slice(comptime!(2 * tile * PARTS));
    let mut value_stage = Shared::<[f32]>::new_slice(comptime!(3 * tile * width));
    let task = min(CUBE_POS, layout.tasks - 1);
    let part = part_of(table, &layout, task, CUBE_POS < layout.tasks, sizes);
    let place = place_of(&layout, part.head, sizes);
    let before = (task * dim + part.row) * width;
    let after = layout.states_at + before;
    let mut first = before;
    if comptime!(back) {
        first = after;
    }
    let mut state = load_row(states, first, width);
    let tiles = (part.end - part.start).div_ceil(tile);
    for index in 0..tiles {
        let mut row = part.start + index * tile;
        if comptime!(back) {
            row = part.start + (tiles - 1 - index) * tile;
        }
        let count = min(part.end - row, tile);
        load_keys::<F>(qkv, &place, &layout, row, count, &mut stage, &mut norms, dim, tile, units);
        load_values(d_out, beta, vectors, &layout, row, count, part.head, &mut value_stage, width, units);
        for done in 0..count {
            let mut token = done;
            if comptime!(back) {
                token = count - 1 - done;
            }
            let of = (row + token) * layout.values + part.head;
            let query = stage[token * comptime!(2 * dim) + part.row];
            let key = stage[token * comptime!(2 * dim) + dim + part.row];
            let at = token * comptime!(3 * width);
            let to = of * comptime!(2 * dim) + part.row;
            let decay = g[of].exp();
            if comptime!(back) {
                let d_key = step_back(&mut state, &value_stage, at, decay, query, key, width);
                if part.writes {
                    // the unit has written the rest itself
                    d_qk[to + dim] += d_key;
                }
            } else {
                let (d_query, d_key) = step(&mut state, &value_stage, at, decay, key, width);
                if part.writes {
                    d_qk[to] = d_query;
                    d_qk[to + dim] = d_key;
                }
            }
        }
        sync_cube();
    }
    if comptime!(!back) {
        let mut lanes = Shared::<[f32]>::new_slice(units);
        let mut entry = product(&state, states, after, width);
        if !part.writes {
            entry = 0.0f32;
        }
        let sum = row_sum(&mut lanes, entry, units);
        if part.writes && UNIT_POS == 0 {
            d_qk[layout.products_at + task] = sum;
        }
    }
}
