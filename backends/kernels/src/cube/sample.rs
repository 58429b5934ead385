//! Samples one token from every row of logits: the likeliest, or a random one of the whole or a truncated distribution,
//! without sorting.
//!
//! A cube has a row. Thresholds of top-k and top-p are found by radix select over the bits of floats, two at a time.
//! The token at which the cumulative sum reaches the uniform number is searched in parts of the row, then in parts of
//! that part, then token by token.

mod truncation;

use super::prelude::*;
use crate::shapes::{SampleOptions, Truncation};
use burn::tensor::TensorData;
use truncation::{Bounds, BoundsLaunch, Row, Support, Truncates, rank_of, truncated_support, weight_of};

/// Parts of a row that are summed first, each by [`LANES_PER_PART`] units with coalesced reads.
const PARTS: usize = 16;
const LANES_PER_PART: usize = UNITS / PARTS;

/// Token ids that f32 represents exactly.
const IDS: usize = 1 << 24;

/// Returns true if the kernel takes these logits.
pub(crate) fn takes(logits: &Tensor<2>) -> bool {
    supports(Operation::Draw, logits) && logits.dims()[1] <= IDS
}

/// See [`crate::sample_rows_on_device`].
pub(crate) fn sample_rows_on_device(logits: &Tensor<2>, choice: SampleOptions<'_>) -> Tensor<2> {
    let uniforms = choice.uniforms.map(|uniforms| {
        let uniforms = TensorData::new(uniforms.to_vec(), [uniforms.len()]);
        Tensor::<1>::from_data(uniforms, (&logits.device(), DType::F32))
    });
    draw_rows(logits, choice.temperature, choice.truncation, uniforms.as_ref())
}

/// See [`crate::draw_rows`].
pub(crate) fn draw_rows(
    logits: &Tensor<2>,
    temperature: f64,
    truncation: Truncation,
    uniforms: Option<&Tensor<1>>,
) -> Tensor<2> {
    let _span = span("draw", 0.0);
    let logits = detached(logits.clone());
    let [rows, vocab] = dims(&logits);
    let out = empty(&logits, [rows, 3], DType::F32);
    let grid = Grid::cubes([&logits], rows);
    let (inverse, dtype) = (1.0 / temperature as f32, elem(&logits));
    // low bits of f32 that are 0 in all values of a type
    let spare = match logits.dtype {
        DType::BF16 => 16,
        DType::F16 => 13,
        _ => 0,
    };
    let Some(uniforms) = uniforms else {
        launch!(greedy, grid, [logits, &out], rows, vocab, inverse, dtype);
        return Cube::tensor(out);
    };
    let top_k = truncation.top_k.unwrap_or(vocab).max(1);
    let uniforms = detached(uniforms.clone());
    let bounds = BoundsLaunch::new(top_k as f32, truncation.top_p as f32, truncation.min_p as f32);
    let truncates = Truncates { by_count: top_k < vocab, by_share: truncation.top_p < 1.0, spare };
    launch!(sample, grid, [logits, uniforms, &out], rows, vocab, inverse, bounds, truncates, dtype);
    Cube::tensor(out)
}

/// The largest logit, and the sum of all weights.
#[cube]
fn max_and_sum<F: Float>(
    logits: &[F],
    lanes: &mut Shared<[f32]>,
    first: usize,
    vocab: usize,
    inverse: f32,
) -> (f32, f32) {
    let mut largest = f32::new(-3.0e38);
    let mut sum = 0.0f32;
    let mut i = UNIT_POS as usize;
    while i < vocab {
        let z = f32::cast_from(logits[first + i]);
        if z > largest {
            sum *= ((largest - z) * inverse).exp();
            largest = z;
        }
        sum += ((z - largest) * inverse).exp();
        i += UNITS;
    }
    let top = row_max::<f32>(lanes, largest, UNITS);
    let scaled = sum * ((largest - top) * inverse).exp();
    let full = row_sum(lanes, scaled, UNITS);
    (top, full)
}

/// The first token with the largest logit.
#[cube]
fn argmax<F: Float>(logits: &[F], lanes: &mut Shared<[f32]>, row: &Row) -> usize {
    let mut place = f32::new(-3.0e38);
    let mut i = UNIT_POS as usize;
    while i < row.vocab {
        if f32::cast_from(logits[row.first + i]) >= row.largest && place < -1.0e38f32 {
            place = -f32::cast_from(i as u32);
        }
        i += UNITS;
    }
    // the first index is the largest negated one; a row of NaN has none
    let first = max(row_max::<f32>(lanes, place, UNITS), 1.0f32 - row.vocab as f32);
    u32::cast_from(-first) as usize
}

/// Of every `stride`-th token from `from` on: the sum of weights above the threshold, and the number of tokens at it.
#[cube]
fn partial_mass<F: Float>(
    logits: &[F],
    row: &Row,
    support: &Support,
    from: usize,
    to: usize,
    stride: usize,
    #[comptime] spare: u32,
) -> (f32, f32) {
    let mut weight = 0.0f32;
    let mut ties = 0.0f32;
    let mut i = from;
    while i < to {
        let z = f32::cast_from(logits[row.first + i]);
        let rank = rank_of(z, spare);
        let token_weight = weight_of(z, row);
        if rank == support.rank {
            ties += 1.0f32;
        } else if rank > support.rank && token_weight >= support.least {
            weight += token_weight;
        }
        i += stride;
    }
    (weight, ties)
}

/// Of parts that were summed by `beside` units each, the first at which the cumulative weight of kept tokens reaches a
/// threshold, or the last with any weight; the weight and the ties before it, and the total weight.
#[cube]
fn find_part(
    lanes: &mut Shared<[f32]>,
    tied: &mut Shared<[f32]>,
    support: &Support,
    before: f32,
    ties_then: f32,
    threshold: f32,
    #[comptime] beside: usize,
) -> (usize, f32, f32, f32) {
    let mut running = before;
    let mut seen = ties_then;
    let mut part = 0usize;
    let mut start = before;
    let mut ties_before = ties_then;
    let mut reached = false;
    for p in 0..comptime!(UNITS / beside) {
        let mut weight = 0.0f32;
        let mut ties = 0.0f32;
        for lane in 0..beside {
            weight += lanes[p * beside + lane];
            ties += tied[p * beside + lane];
        }
        let own_ties = max(min(support.ties - seen, ties), 0.0f32);
        let kept = weight + own_ties * support.tied;
        if kept > 0.0f32 && !reached {
            part = p;
            start = running;
            ties_before = seen;
            reached = running + kept >= threshold;
        }
        running += kept;
        seen += ties;
    }
    (part, start, ties_before, running)
}

/// Of a unit's tokens, the first at which the cumulative weight of kept tokens reaches a threshold, or the last kept
/// one.
#[cube]
fn find_token<F: Float>(
    logits: &[F],
    row: &Row,
    support: &Support,
    from: usize,
    to: usize,
    before: f32,
    ties_then: f32,
    threshold: f32,
    #[comptime] spare: u32,
) -> usize {
    let mut sum = before;
    let mut seen = ties_then;
    let mut reached = false;
    let mut token = min(from, row.vocab - 1);
    for i in from..to {
        let z = f32::cast_from(logits[row.first + i]);
        let rank = rank_of(z, spare);
        let weight = weight_of(z, row);
        let mut keep = rank > support.rank;
        if rank == support.rank {
            keep = seen < support.ties;
            seen += 1.0f32;
        }
        if keep && weight >= support.least && !reached {
            sum += weight;
            token = i;
            reached = sum >= threshold;
        }
    }
    token
}

/// The token at which the cumulative weight of kept tokens reaches the share `uniform` of their total, the unit that
/// has it, and the total.
#[cube]
fn sample_token<F: Float>(
    logits: &[F],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    support: &Support,
    uniform: f32,
    #[comptime] spare: u32,
) -> (usize, usize, f32) {
    let mut tied = Shared::<[f32]>::new_slice(UNITS);
    let unit = UNIT_POS as usize;
    let each = row.vocab.div_ceil(PARTS);
    let first = min(unit / LANES_PER_PART * each, row.vocab);
    let end = min(first + each, row.vocab);
    let (weight, ties) =
        partial_mass::<F>(logits, row, support, first + unit % LANES_PER_PART, end, LANES_PER_PART, spare);
    lanes[unit] = weight;
    tied[unit] = ties;
    sync_cube();
    let none = f32::new(0.0);
    let top = f32::new(3.0e38);
    let (_part, _start, _ties, mass) = find_part(lanes, &mut tied, support, none, none, top, LANES_PER_PART);
    let threshold = uniform * mass;
    let (part, start, ties, _all) = find_part(lanes, &mut tied, support, none, none, threshold, LANES_PER_PART);
    sync_cube();
    let first = min(part * each, row.vocab);
    let end = min(first + each, row.vocab);
    let few = each.div_ceil(UNITS);
    let from = min(first + unit * few, end);
    let to = min(from + few, end);
    let (weight, own_ties) = partial_mass::<F>(logits, row, support, from, to, 1usize, spare);
    lanes[unit] = weight;
    tied[unit] = own_ties;
    sync_cube();
    let (winner, start, ties, _all) = find_part(lanes, &mut tied, support, start, ties, threshold, 1usize);
    let mut token = 0usize;
    if unit == winner {
        token = find_token::<F>(logits, row, support, from, to, start, ties, threshold, spare);
    }
    (token, winner, mass)
}

/// Writes a row's token, its log-prob under the distribution that it was sampled from, and that under the whole one.
#[cube]
fn write_token<F: Float>(logits: &[F], out: &mut [f32], row: &Row, token: usize, mass: f32, full: f32) {
    let at = row.first / row.vocab * 3;
    let centred = (f32::cast_from(logits[row.first + token]) - row.largest) * row.inverse;
    out[at] = f32::cast_from(token as u32);
    out[at + 1] = centred - mass.ln();
    out[at + 2] = centred - full.ln();
}

/// The likeliest token of every row.
#[cube(launch, address_type = "dynamic")]
fn greedy<F: Float>(
    logits: &[F],
    out: &mut [f32],
    rows: usize,
    vocab: usize,
    inverse: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(UNITS);
    let first = min(CUBE_POS, rows - 1) * vocab;
    let (largest, full) = max_and_sum::<F>(logits, &mut lanes, first, vocab, inverse);
    let row = Row { first, vocab, largest, inverse };
    let token = argmax::<F>(logits, &mut lanes, &row);
    if UNIT_POS == 0 && CUBE_POS < rows {
        write_token::<F>(logits, out, &row, token, full, full);
    }
}

/// A random token of every row.
#[cube(launch, address_type = "dynamic")]
fn sample<F: Float>(
    logits: &[F],
    uniforms: &[f32],
    out: &mut [f32],
    rows: usize,
    vocab: usize,
    inverse: f32,
    bounds: Bounds,
    #[comptime] truncates: Truncates,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(UNITS);
    let index = min(CUBE_POS, rows - 1);
    let first = index * vocab;
    let (largest, full) = max_and_sum::<F>(logits, &mut lanes, first, vocab, inverse);
    let row = Row { first, vocab, largest, inverse };
    let support = truncated_support::<F>(logits, &mut lanes, &row, full, &bounds, truncates);
    let spare = comptime!(truncates.spare);
    let (token, winner, mass) = sample_token::<F>(logits, &mut lanes, &row, &support, uniforms[index], spare);
    if UNIT_POS as usize == winner && CUBE_POS < rows {
        write_token::<F>(logits, out, &row, token, mass, full);
    }
}
