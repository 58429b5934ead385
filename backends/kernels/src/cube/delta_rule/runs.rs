//! Runs through sequences, from their first tokens to their last or back. A unit has a column of a value head's state.

use super::sizes::{Keep, PARTS, Sizes};
use super::tile::{
    RuleLayout, add_column, clear, column_at, load_keys, place_of, read_column, run_of, total, write_column,
};
use crate::delta::CHUNK;
use cubecl::prelude::*;

/// The change u of a token, and its output. `at` is the offset of its query, behind which the key is.
#[cube]
fn step(
    state: &mut Array<f32>,
    stage: &Shared<[f32]>,
    at: usize,
    decay: f32,
    beta: f32,
    value: f32,
    #[comptime] dim: usize,
) -> (f32, f32) {
    let mut sums = Array::<f32>::new(4usize);
    clear(&mut sums, 4usize);
    #[unroll]
    for i in 0..dim {
        let s = state[i] * decay;
        state[i] = s;
        sums[comptime!(i % 4)] += s * stage[at + comptime!(dim + i)];
    }
    let u = value - total(&sums);
    let delta = beta * u;
    clear(&mut sums, 4usize);
    #[unroll]
    for i in 0..dim {
        let s = state[i] + stage[at + comptime!(dim + i)] * delta;
        state[i] = s;
        sums[comptime!(i % 4)] += s * stage[at + i];
    }
    (u, total(&sums))
}

/// The output of every token, `[rows, values · value_dim]`, or its u. A sequence that goes on behind another begins with
/// its end state, which is among the states.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn delta_rule_forward<F: Float>(
    qkv: &[F],
    g: &[f32],
    beta: &[f32],
    table: &[i32],
    out: &mut [f32],
    states: &mut [f32],
    layout: RuleLayout,
    #[comptime] keep: Keep,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.key_dim);
    let tile = comptime!(sizes.tile());
    let mut state = Array::<f32>::new(dim);
    let mut stage = Shared::<[f32]>::new_slice(comptime!(2 * tile * dim));
    let mut norms = Shared::<[f32]>::new_slice(comptime!(2 * tile * PARTS));
    clear(&mut state, dim);
    let values = layout.values;
    let run = run_of(table, &layout, sizes);
    let place = place_of(&layout, run.head, sizes);
    if comptime!(keep == Keep::Pool) {
        let first = column_at(&run, run.slot, values, sizes);
        read_column(&mut state, &*states, first, !run.begins, sizes);
    } else {
        let known = run.start_state > 0;
        let mut place = 0usize;
        if known {
            place = run.start_state - 1;
        }
        let first = layout.ends_at + column_at(&run, place, values, sizes);
        read_column(&mut state, &*states, first, known, sizes);
    }
    let mut row = run.start;
    while row < run.end {
        let before = row - run.start;
        if comptime!(keep == Keep::Chunks) {
            let first = column_at(&run, run.chunk + before / CHUNK, values, sizes);
            let begins = before % CHUNK == 0;
            write_column(&state, states, first, run.writes && begins, sizes);
        }
        let count = min(run.end - row, tile);
        load_keys::<F>(qkv, &place, &layout, row, count, &mut stage, &mut norms, dim, tile, comptime!(sizes.units()));
        for token in 0..count {
            let token_head = (row + token) * values + run.head;
            let value = qkv[(row + token) * place.channels + place.value + run.column];
            let (u, read) = step(
                &mut state,
                &stage,
                token * comptime!(2 * dim),
                g[token_head].exp(),
                beta[token_head],
                f32::cast_from(value),
                dim,
            );
            let mut result = read;
            if comptime!(keep == Keep::Chunks) {
                result = u;
            }
            if run.writes {
                out[token_head * comptime!(sizes.value_dim) + run.column] = result;
            }
        }
        sync_cube();
        row += tile;
    }
    if comptime!(keep == Keep::Pool) {
        let first = column_at(&run, run.slot, values, sizes);
        write_column(&state, states, first, run.writes, sizes);
    } else {
        let handed = run.end_state > 0;
        let mut place = 0usize;
        if handed {
            place = run.end_state - 1;
        }
        let first = layout.ends_at + column_at(&run, place, values, sizes);
        write_column(&state, states, first, run.writes && handed, sizes);
    }
}

/// dδ of a token, given its output's gradient; the gradient of the state after it becomes that of the state before.
#[cube]
fn step_back(
    d_state: &mut Array<f32>,
    stage: &Shared<[f32]>,
    at: usize,
    decay: f32,
    beta: f32,
    d_out: f32,
    #[comptime] dim: usize,
) -> f32 {
    let mut sums = Array::<f32>::new(4usize);
    clear(&mut sums, 4usize);
    #[unroll]
    for i in 0..dim {
        let d = d_state[i] + stage[at + i] * d_out;
        d_state[i] = d;
        sums[comptime!(i % 4)] += d * stage[at + comptime!(dim + i)];
    }
    let d_delta = total(&sums);
    let pull = beta * d_delta;
    #[unroll]
    for i in 0..dim {
        let d = d_state[i] - stage[at + comptime!(dim + i)] * pull;
        d_state[i] = d * decay;
    }
    d_delta
}

/// dδ of every token, and the gradients of the states after each chunk, each in the second half of its buffer; then those
/// of the first states of sequences that go on behind others. An end state has the sum of those that begin with it, in
/// their order.
#[cube(launch, address_type = "dynamic")]
pub(crate) fn delta_rule_reverse<F: Float>(
    qkv: &[F],
    g: &[f32],
    beta: &[f32],
    d_out: &[f32],
    table: &[i32],
    vectors: &mut [f32],
    states: &mut [f32],
    layout: RuleLayout,
    #[comptime] sizes: Sizes,
    #[define(F)] _dtype: ElemType,
) {
    let dim = comptime!(sizes.key_dim);
    let tile = comptime!(sizes.tile());
    let mut d_state = Array::<f32>::new(dim);
    let mut stage = Shared::<[f32]>::new_slice(comptime!(2 * tile * dim));
    let mut norms = Shared::<[f32]>::new_slice(comptime!(2 * tile * PARTS));
    clear(&mut d_state, dim);
    let values = layout.values;
    let run = run_of(table, &layout, sizes);
    let place = place_of(&layout, run.head, sizes);
    for child in run.child..run.children_end {
        let first = layout.starts_at + column_at(&run, child, values, sizes);
        add_column(&mut d_state, &*states, first, sizes);
    }
    let length = run.end - run.start;
    let tiles = length.div_ceil(tile);
    for back in 0..tiles {
        let before = (tiles - 1 - back) * tile;
        let count = min(length - before, tile);
        let after = before + count;
        let ends = after == length || after % CHUNK == 0;
        let first = column_at(&run, run.chunk + before / CHUNK, values, sizes);
        write_column(&d_state, states, layout.states_at + first, run.writes && ends, sizes);
        let row = run.start + before;
        load_keys::<F>(qkv, &place, &layout, row, count, &mut stage, &mut norms, dim, tile, comptime!(sizes.units()));
        for done in 0..count {
            let token = count - 1 - done;
            let token_head = (row + token) * values + run.head;
            let at = token_head * comptime!(sizes.value_dim) + run.column;
            let d_delta = step_back(
                &mut d_state,
                &stage,
                token * comptime!(2 * dim),
                g[token_head].exp(),
                beta[token_head],
                d_out[at],
                dim,
            );
            if run.writes {
                vectors[layout.vectors_at + at] = d_delta;
            }
        }
        sync_cube();
    }
    let first = layout.starts_at + column_at(&run, run.place, values, sizes);
    write_column(&d_state, states, first, run.writes && run.start_state > 0, sizes);
}
