//! Samples one token from every row of logits: the likeliest, or a random one of the whole or a truncated distribution,
//! without sorting.
//!
//! Cubes score parts of all rows, with the largest logit and the sum of weights of each. Then a cube has a row. Thresholds
//! of top-k and top-p are found by radix select over the bits of floats, two at a time, in the parts that may reach them.
//! The token at which the cumulative sum reaches the uniform number is searched in groups of parts, then in slices of a
//! group, then token by token. All orders depend on the size of the vocabulary alone.

mod truncation;

use super::prelude::*;
use crate::shapes::{SampleOptions, Truncation};
use burn::tensor::TensorData;
use truncation::{Bounds, BoundsLaunch, Row, Support, Truncates, rank_of, rank_of_part, truncated_support, weight_of};

/// Logits of a part of a row.
const PART: usize = 2048;

/// Groups of parts that are summed first, each by [`LANES`] units.
const GROUPS: usize = 16;
const LANES: usize = UNITS / GROUPS;

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
    let parts = vocab.div_ceil(PART);
    let scores = empty(&logits, [rows, parts, 2], DType::F32);
    let size = vector_size([&logits], vocab);
    let (inverse, dtype) = (1.0 / temperature as f32, elem(&logits));
    launch!(score_parts, Grid::cubes([&logits], rows * parts), size, [&logits, &scores], rows, vocab, inverse, dtype);
    let grid = Grid::cubes([&logits], rows);
    // low bits of f32 that are 0 in all values of a type
    let spare = match logits.dtype {
        DType::BF16 => 16,
        DType::F16 => 13,
        _ => 0,
    };
    let Some(uniforms) = uniforms else {
        launch!(greedy, grid, size, [logits, scores, &out], rows, vocab, inverse, dtype);
        return Cube::tensor(out);
    };
    let top_k = truncation.top_k.unwrap_or(vocab).max(1);
    let uniforms = detached(uniforms.clone());
    let bounds = BoundsLaunch::new(top_k as f32, truncation.top_p as f32, truncation.min_p as f32);
    let truncates = Truncates {
        by_count: top_k < vocab,
        by_share: truncation.top_p < 1.0,
        by_weight: truncation.min_p > 0.0,
        spare,
    };
    launch!(sample, grid, size, [logits, scores, uniforms, &out], rows, vocab, inverse, bounds, truncates, dtype);
    Cube::tensor(out)
}

/// The sum of a value over the units of a cube, or the largest, in a fixed order. `lanes` has an element for each.
#[cube]
fn reduce(lanes: &mut Shared<[f32]>, value: f32, #[comptime] to_largest: bool) -> f32 {
    let unit = UNIT_POS as usize;
    lanes[unit] = value;
    sync_cube();
    let mut own = value;
    if unit < LANES {
        for other in 1..GROUPS {
            own = merged(own, lanes[other * LANES + unit], to_largest);
        }
    }
    sync_cube();
    if unit < LANES {
        lanes[unit] = own;
    }
    sync_cube();
    let mut all = lanes[0];
    for other in 1..LANES {
        all = merged(all, lanes[other], to_largest);
    }
    sync_cube();
    all
}

#[cube]
fn merged(a: f32, b: f32, #[comptime] to_largest: bool) -> f32 {
    let mut both = a + b;
    if to_largest {
        both = max(a, b);
    }
    both
}

/// Writes the largest logit of each part of a row, and the sum of weights relative to it.
#[cube(launch, address_type = "dynamic")]
fn score_parts<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &mut [f32],
    rows: usize,
    vocab: usize,
    inverse: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(UNITS);
    let parts = vocab.div_ceil(PART);
    let index = min(CUBE_POS, rows * parts - 1);
    let first = index / parts * vocab;
    let from = index % parts * PART + UNIT_POS as usize * N::value();
    let end = min((index % parts + 1) * PART, vocab);
    let mut largest = f32::new(-3.0e38);
    let mut i = from;
    while i < end {
        let vector = logits[(first + i) / N::value()];
        #[unroll]
        for e in 0..N::value() {
            largest = max(largest, f32::cast_from(vector.extract(e)));
        }
        i += UNITS * N::value();
    }
    let largest = reduce(&mut lanes, largest, true);
    let mut sum = 0.0f32;
    let mut i = from;
    while i < end {
        let vector = logits[(first + i) / N::value()];
        #[unroll]
        for e in 0..N::value() {
            sum += ((f32::cast_from(vector.extract(e)) - largest) * inverse).exp();
        }
        i += UNITS * N::value();
    }
    let sum = reduce(&mut lanes, sum, false);
    if UNIT_POS == 0 && CUBE_POS < rows * parts {
        scores[2 * index] = largest;
        scores[2 * index + 1] = sum;
    }
}

/// The weight of all tokens of a part.
#[cube]
fn weight_of_part(scores: &[f32], row: &Row, part: usize) -> f32 {
    let at = row.first_score + 2 * part;
    scores[at + 1] * weight_of(scores[at], row)
}

/// A row by its parts, and the sum of all weights.
#[cube]
fn row_of(scores: &[f32], lanes: &mut Shared<[f32]>, index: usize, vocab: usize, inverse: f32) -> (Row, f32) {
    let parts = vocab.div_ceil(PART);
    let first_score = index * parts * 2;
    let mut largest = f32::new(-3.0e38);
    let mut part = UNIT_POS as usize;
    while part < parts {
        largest = max(largest, scores[first_score + 2 * part]);
        part += UNITS;
    }
    let largest = reduce(lanes, largest, true);
    let row = Row { first: index * vocab, first_score, vocab, parts, largest, inverse };
    let mut sum = 0.0f32;
    let mut part = UNIT_POS as usize;
    while part < parts {
        sum += weight_of_part(scores, &row, part);
        part += UNITS;
    }
    let full = reduce(lanes, sum, false);
    (row, full)
}

/// The first token with the largest logit.
#[cube]
fn argmax<F: Float, N: Size>(logits: &[Vector<F, N>], scores: &[f32], lanes: &mut Shared<[f32]>, row: &Row) -> usize {
    let mut holder = f32::new(-3.0e38);
    let mut part = UNIT_POS as usize;
    while part < row.parts {
        if scores[row.first_score + 2 * part] >= row.largest && holder < -1.0e38f32 {
            holder = -f32::cast_from(part as u32);
        }
        part += UNITS;
    }
    // the first index is the largest negated one; a row of NaN has none
    let part = u32::cast_from(-max(reduce(lanes, holder, true), 1.0f32 - row.parts as f32)) as usize;
    let end = min((part + 1) * PART, row.vocab);
    let mut place = f32::new(-3.0e38);
    let mut i = part * PART + UNIT_POS as usize * N::value();
    while i < end {
        let vector = logits[(row.first + i) / N::value()];
        #[unroll]
        for e in 0..N::value() {
            if f32::cast_from(vector.extract(e)) >= row.largest && place < -1.0e38f32 {
                place = -f32::cast_from((i + e) as u32);
            }
        }
        i += UNITS * N::value();
    }
    u32::cast_from(-max(reduce(lanes, place, true), 1.0f32 - row.vocab as f32)) as usize
}

/// Of the tokens from `from` on, as many as a load has in every `stride`: the sum of weights above the threshold, and
/// the number of tokens at it.
#[cube]
fn partial_mass<F: Float, N: Size>(
    logits: &[Vector<F, N>],
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
        let vector = logits[(row.first + i) / N::value()];
        #[unroll]
        for e in 0..N::value() {
            let z = f32::cast_from(vector.extract(e));
            let rank = rank_of(z, spare);
            let token_weight = weight_of(z, row);
            if rank == support.rank {
                ties += 1.0f32;
            } else if rank > support.rank && token_weight >= support.least {
                weight += token_weight;
            }
        }
        i += stride;
    }
    (weight, ties)
}

/// Of the parts from `from` on, a unit's share of [`partial_mass`].
#[cube]
fn group_mass<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    row: &Row,
    support: &Support,
    from: usize,
    to: usize,
    #[comptime] truncates: Truncates,
) -> (f32, f32) {
    let lane = UNIT_POS as usize % LANES;
    let spare = comptime!(truncates.spare);
    let mut weight = 0.0f32;
    let mut ties = 0.0f32;
    if comptime!(truncates.any()) {
        for part in from..to {
            if rank_of_part(scores, row, part, spare) >= support.rank {
                let (first, end) = (part * PART + lane * N::value(), min((part + 1) * PART, row.vocab));
                let stride = LANES * N::value();
                let (own, tied) = partial_mass::<F, N>(logits, row, support, first, end, stride, spare);
                weight += own;
                ties += tied;
            }
        }
    } else {
        let mut part = from + lane;
        while part < to {
            weight += weight_of_part(scores, row, part);
            part += LANES;
        }
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
fn find_token<F: Float, N: Size>(
    logits: &[Vector<F, N>],
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
    let mut i = from;
    while i < to {
        let vector = logits[(row.first + i) / N::value()];
        #[unroll]
        for e in 0..N::value() {
            let z = f32::cast_from(vector.extract(e));
            let rank = rank_of(z, spare);
            let weight = weight_of(z, row);
            let mut keep = rank > support.rank;
            if rank == support.rank {
                keep = seen < support.ties;
                seen += 1.0f32;
            }
            if keep && weight >= support.least && !reached {
                sum += weight;
                token = i + e;
                reached = sum >= threshold;
            }
        }
        i += N::value();
    }
    token
}

/// The token at which the cumulative weight of kept tokens reaches the share `uniform` of their total, the unit that
/// has it, and the total.
#[cube]
fn sample_token<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    support: &Support,
    uniform: f32,
    #[comptime] truncates: Truncates,
) -> (usize, usize, f32) {
    let mut tied = Shared::<[f32]>::new_slice(UNITS);
    let unit = UNIT_POS as usize;
    let spare = comptime!(truncates.spare);
    let each = row.parts.div_ceil(GROUPS);
    let first = min(unit / LANES * each, row.parts);
    let end = min(first + each, row.parts);
    let (weight, ties) = group_mass::<F, N>(logits, scores, row, support, first, end, truncates);
    lanes[unit] = weight;
    tied[unit] = ties;
    sync_cube();
    let none = f32::new(0.0);
    let top = f32::new(3.0e38);
    let (_group, _start, _ties, mass) = find_part(lanes, &mut tied, support, none, none, top, LANES);
    let threshold = uniform * mass;
    let (group, start, ties, _all) = find_part(lanes, &mut tied, support, none, none, threshold, LANES);
    sync_cube();
    let first = min(group * each * PART, row.vocab);
    let end = min(first + each * PART, row.vocab);
    let few = each * comptime!(PART / UNITS);
    let from = min(first + unit * few, end);
    let to = min(from + few, end);
    let (weight, own_ties) = partial_mass::<F, N>(logits, row, support, from, to, N::value(), spare);
    lanes[unit] = weight;
    tied[unit] = own_ties;
    sync_cube();
    let (winner, start, ties, _all) = find_part(lanes, &mut tied, support, start, ties, threshold, 1usize);
    let mut token = 0usize;
    if unit == winner {
        token = find_token::<F, N>(logits, row, support, from, to, start, ties, threshold, spare);
    }
    (token, winner, mass)
}

/// Writes a row's token, its log-prob under the distribution that it was sampled from, and that under the whole one.
#[cube]
fn write_token<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    out: &mut [f32],
    row: &Row,
    token: usize,
    mass: f32,
    full: f32,
) {
    let at = row.first / row.vocab * 3;
    let place = row.first + token;
    let vector = logits[place / N::value()];
    let mut z = 0.0f32;
    #[unroll]
    for e in 0..N::value() {
        if place % N::value() == e {
            z = f32::cast_from(vector.extract(e));
        }
    }
    let centred = (z - row.largest) * row.inverse;
    out[at] = f32::cast_from(token as u32);
    out[at + 1] = centred - mass.ln();
    out[at + 2] = centred - full.ln();
}

/// The likeliest token of every row.
#[cube(launch, address_type = "dynamic")]
fn greedy<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    out: &mut [f32],
    rows: usize,
    vocab: usize,
    inverse: f32,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(UNITS);
    let (row, full) = row_of(scores, &mut lanes, min(CUBE_POS, rows - 1), vocab, inverse);
    let token = argmax::<F, N>(logits, scores, &mut lanes, &row);
    if UNIT_POS == 0 && CUBE_POS < rows {
        write_token::<F, N>(logits, out, &row, token, full, full);
    }
}

/// A random token of every row.
#[cube(launch, address_type = "dynamic")]
fn sample<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
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
    let (row, full) = row_of(scores, &mut lanes, index, vocab, inverse);
    let support = truncated_support::<F, N>(logits, scores, &mut lanes, &row, full, &bounds, truncates);
    let (token, winner, mass) =
        sample_token::<F, N>(logits, scores, &mut lanes, &row, &support, uniforms[index], truncates);
    if UNIT_POS as usize == winner && CUBE_POS < rows {
        write_token::<F, N>(logits, out, &row, token, mass, full);
    }
}
