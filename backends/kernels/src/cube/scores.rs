//! Log-probabilities and entropies of rows of logits, one tile of the vocabulary at a time, and their gradient, in
//! place.
//!
//! With z = softcap(logits) / τ, a row's state over the tiles so far is max z, Σ e, Σ e (z − max) with e = exp(z −
//! max), and the target's z (online softmax; Milakov & Gimelshein, 2018). Formulas: [`crate::score_rows`].

use super::glu::tanh;
use super::prelude::*;
use crate::choice::TILE;
use crate::shapes::{RowScores, RunningScores, Scaling, ScoreGradients};
use burn::tensor::Int;

/// See [`crate::softcap`].
pub(crate) fn softcap(logits: Tensor<2>, cap: f64) -> Tensor<2> {
    let _span = span("scores", 0.0);
    let logits = detached(logits);
    let out = empty(&logits, logits.shape(), DType::F32);
    let n = logits.shape().num_elements();
    launch!(cap_logits, Grid::elements([&logits], n), [&logits, &out], n, cap as f32, elem(&logits));
    Cube::tensor(out)
}

/// See [`crate::score_rows`]: a kernel has tiles of whole rows one after the other, with the bits that they have one by
/// one.
pub(crate) fn score_rows(logits: &Tensor<2>, targets: &Tensor<1, Int>, scaling: Scaling) -> RowScores {
    finish_scores(score_tile(logits, 0, targets, None, scaling))
}

/// See [`crate::score_gradient`].
pub(crate) fn score_gradient(
    logits: Tensor<2>,
    targets: &Tensor<1, Int>,
    scores: &RowScores,
    upstream: ScoreGradients<'_>,
    scaling: Scaling,
) -> Tensor<2> {
    tile_gradient(logits, 0, targets, scores, upstream, scaling)
}

/// Adds a tile of logits, `[rows, width]`, that begins at column `first` of the vocabulary; see
/// [`crate::score_tile`].
pub(crate) fn score_tile(
    logits: &Tensor<2>,
    first: usize,
    targets: &Tensor<1, Int>,
    running: Option<RunningScores>,
    scaling: Scaling,
) -> RunningScores {
    let _span = span("scores", 0.0);
    let logits = detached(logits.clone());
    let [rows, width] = dims(&logits);
    let fresh = running.is_none();
    let state = match running {
        Some(running) => Cube::primitive(running.0),
        None => empty(&logits, [rows, 4], DType::F32),
    };
    // of the last tile, which may be small, as of the others
    let grid = RowGrid::new(if first > 0 { TILE } else { width.min(TILE) });
    let dtype = elem(&logits);
    let (cubes, tile) = (grid.cubes([&logits], rows), tile_of([rows, width], first, scaling));
    let (fresh, capped) = (u32::from(fresh), scaling.softcap.is_some());
    launch!(update_state, cubes, [logits, integers(targets), &state], tile, fresh, capped, grid, dtype);
    RunningScores(Cube::tensor(state))
}

/// Log-probs, entropies, logsumexps and means from the state over all tiles.
pub(crate) fn finish_scores(running: RunningScores) -> RowScores {
    let state = Cube::primitive(running.0);
    let [rows, _] = dims(&state);
    let out = empty(&state, [4, rows], DType::F32);
    launch!(finish_state, Grid::elements([&state], rows), [&state, &out], rows);
    let out: Tensor<2> = Cube::tensor(out);
    let row = |i| out.clone().narrow(0, i, 1).reshape([rows]);
    RowScores { logp: row(0), entropy: row(1), lse: row(2), mean: row(3) }
}

/// Gradient with respect to a tile of raw logits, in place where they are not shared; see
/// [`crate::tile_gradient`].
pub(crate) fn tile_gradient(
    logits: Tensor<2>,
    first: usize,
    targets: &Tensor<1, Int>,
    scores: &RowScores,
    upstream: ScoreGradients<'_>,
    scaling: Scaling,
) -> Tensor<2> {
    let _span = span("scores", 0.0);
    let logits = detached(logits);
    let [rows, width] = dims(&logits);
    let (out, in_place) = reuse_or_alloc(&logits);
    let float = |t: &Tensor<1>| detached(t.clone().cast(DType::F32));
    let d_entropy = upstream.d_entropy.unwrap_or(upstream.d_logp);
    let grid = Grid::elements([&out], rows * width);
    let [lse, mean, d_logp, d_entropy] = [&scores.lse, &scores.mean, upstream.d_logp, d_entropy].map(float);
    let (tile, capped, entropy) =
        (tile_of([rows, width], first, scaling), scaling.softcap.is_some(), upstream.d_entropy.is_some());
    let (targets, y) = (integers(targets), output_arg(&out, in_place, 0));
    launch!(gradient, grid, [logits, targets, lse, mean, d_logp, d_entropy, y], tile, capped, entropy, elem(&out));
    Cube::tensor(out)
}

/// A tile of logits, and how they become z.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Tile {
    rows: usize,
    width: usize,
    /// Its first column in the vocabulary.
    first: i32,
    /// 1 / temperature.
    inverse: f32,
    /// The soft-cap, or 1 where there is none.
    cap: f32,
}

fn tile_of([rows, width]: [usize; 2], first: usize, scaling: Scaling) -> TileLaunch {
    let cap = scaling.softcap.unwrap_or(1.0);
    TileLaunch::new(rows, width, first as i32, 1.0 / scaling.temperature as f32, cap as f32)
}

/// Soft-capped logits in f32. A unit has one.
#[cube(launch, address_type = "dynamic")]
fn cap_logits<F: Float>(logits: &[F], out: &mut [f32], n: usize, cap: f32, #[define(F)] _dtype: ElemType) {
    let i = ABSOLUTE_POS;
    if i < n {
        out[i] = tanh(f32::cast_from(logits[i]) / cap) * cap;
    }
}

/// The z of a logit, and its derivative.
#[cube]
fn scaled(logit: f32, tile: &Tile, #[comptime] capped: bool) -> (f32, f32) {
    let mut z = logit * tile.inverse;
    let mut slope = tile.inverse;
    if capped {
        let t = tanh(logit / tile.cap);
        z = t * tile.cap * tile.inverse;
        slope = (1.0f32 - t * t) * tile.inverse;
    }
    (z, slope)
}

/// The factor that rescales a state whose maximum is `from` to the maximum `to`, which is no smaller.
#[cube]
fn shrunk(from: f32, to: f32) -> f32 {
    // the sum of an empty state is 0 times any factor, and the maximum is finite, so that the difference is
    (from - to).exp()
}

/// Updates the state of every row by logits, of which [`TILE`] columns at a time are merged.
#[cube(launch, address_type = "dynamic")]
fn update_state<F: Float>(
    logits: &[F],
    targets: &[i32],
    state: &mut [f32],
    tile: Tile,
    fresh: u32,
    #[comptime] capped: bool,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let units = comptime!(grid.units);
    let mut lanes = row_lanes(grid);
    let row = row_index(grid);
    let is_row = row < tile.rows;
    let at = row * 4;
    let mut total_max = f32::new(-1.0e30);
    let mut total_sum = 0.0f32;
    let mut total_moment = 0.0f32;
    let mut target_z = 0.0f32;
    if is_row && fresh == 0 {
        total_max = state[at];
        total_sum = state[at + 1];
        total_moment = state[at + 2];
        target_z = state[at + 3];
    }
    let mut first = 0usize;
    while first < tile.width {
        let end = min(first + TILE, tile.width);
        let mut largest = f32::new(-1.0e30);
        let mut sum = 0.0f32;
        let mut moment = 0.0f32;
        if is_row {
            let mut i = first + UNIT_POS_X as usize;
            while i < end {
                let (z, _) = scaled(f32::cast_from(logits[row * tile.width + i]), &tile, capped);
                if z > largest {
                    let f = shrunk(largest, z);
                    moment = f * (moment + sum * (largest - z));
                    sum *= f;
                    largest = z;
                }
                let e = (z - largest).exp();
                sum += e;
                moment += e * (z - largest);
                i += units;
            }
        }
        let tile_max = row_max::<f32>(&mut lanes, largest, units);
        let f = shrunk(largest, tile_max);
        let tile_sum = row_sum(&mut lanes, sum * f, units);
        let tile_moment = row_sum(&mut lanes, f * (moment + sum * (largest - tile_max)), units);
        let level = max(total_max, tile_max);
        let a = shrunk(total_max, level);
        let b = shrunk(tile_max, level);
        total_moment =
            a * (total_moment + total_sum * (total_max - level)) + b * (tile_moment + tile_sum * (tile_max - level));
        total_sum = a * total_sum + b * tile_sum;
        total_max = level;
        first += TILE;
    }
    if is_row && UNIT_POS_X == 0 {
        let target = targets[row] - tile.first;
        if target >= 0 && target < tile.width as i32 {
            let logit = f32::cast_from(logits[row * tile.width + target as usize]);
            let (z, _) = scaled(logit, &tile, capped);
            target_z = z;
        }
        state[at] = total_max;
        state[at + 1] = total_sum;
        state[at + 2] = total_moment;
        state[at + 3] = target_z;
    }
}

/// Log-prob, entropy, logsumexp and Σ p z of every row: `[4, rows]`.
#[cube(launch, address_type = "dynamic")]
fn finish_state(state: &[f32], out: &mut [f32], rows: usize) {
    let row = ABSOLUTE_POS;
    if row < rows {
        let at = row * 4;
        let log_sum = state[at + 1].ln();
        let centred = state[at + 2] / state[at + 1];
        let lse = state[at] + log_sum;
        out[row] = state[at + 3] - lse;
        out[rows + row] = log_sum - centred;
        out[2 * rows + row] = lse;
        out[3 * rows + row] = state[at] + centred;
    }
}

/// The gradient with respect to raw logits. A unit has one.
#[cube(launch, address_type = "dynamic")]
fn gradient<F: Float>(
    logits: &[F],
    targets: &[i32],
    lse: &[f32],
    mean: &[f32],
    d_logp: &[f32],
    d_entropy: &[f32],
    out: &mut [F],
    tile: Tile,
    #[comptime] capped: bool,
    #[comptime] entropy: bool,
    #[define(F)] _dtype: ElemType,
) {
    let i = ABSOLUTE_POS;
    if i < tile.rows * tile.width {
        let row = i / tile.width;
        let column = (i % tile.width) as i32;
        let (z, slope) = scaled(f32::cast_from(logits[i]), &tile, capped);
        let mut upstream = d_logp[row];
        if entropy {
            upstream += d_entropy[row] * (z - mean[row]);
        }
        let mut d = -(z - lse[row]).exp() * upstream;
        if targets[row] - tile.first == column {
            d += d_logp[row];
        }
        out[i] = F::cast_from(d * slope);
    }
}
