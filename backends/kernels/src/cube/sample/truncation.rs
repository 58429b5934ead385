//! Truncation of a row's distribution, by radix select over the bits of floats, two at a time. A pass reads the parts of
//! a row whose largest logit reaches the smallest bound that is tried: few after the first bits.

use super::{PART, reduce};
use crate::cube::prelude::*;

/// A row, and how its logits become weights: `exp((z − largest) / temperature)`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Row {
    /// Offsets of its first logit, and of its first part's score.
    pub first: usize,
    pub first_score: usize,
    pub vocab: usize,
    pub parts: usize,
    pub largest: f32,
    /// 1 / temperature.
    pub inverse: f32,
}

/// The bounds of top-k, top-p and min-p.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Bounds {
    pub top_k: f32,
    pub top_p: f32,
    pub min_p: f32,
}

/// Truncations that a kernel is compiled for, and the low bits that are 0 in all logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Truncates {
    pub by_count: bool,
    pub by_share: bool,
    pub by_weight: bool,
    pub spare: u32,
}

impl Truncates {
    /// True if any token may be left out.
    pub const fn any(self) -> bool {
        self.by_count || self.by_share || self.by_weight
    }
}

/// The tokens of a row that are kept: those above a rank, and the first few at it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(super) struct Support {
    pub rank: u32,
    /// Tokens kept at the rank.
    pub ties: f32,
    /// The weight of each of them.
    pub tied: f32,
    /// No token of a smaller weight is kept (min-p).
    pub least: f32,
}

#[cube]
pub(super) fn weight_of(z: f32, row: &Row) -> f32 {
    ((z - row.largest) * row.inverse).exp()
}

/// A float as an integer of the same order, without the low bits that are 0 in all values.
#[cube]
pub(super) fn rank_of(z: f32, #[comptime] spare: u32) -> u32 {
    let bits = u32::reinterpret(z);
    let mut ordered = bits | 0x8000_0000u32;
    if bits >= 0x8000_0000u32 {
        ordered = bits ^ 0xffff_ffffu32;
    }
    ordered >> spare
}

/// The inverse of [`rank_of`].
#[cube]
fn value_of(rank: u32, #[comptime] spare: u32) -> f32 {
    let ordered = rank << spare;
    let mut bits = ordered ^ 0x8000_0000u32;
    if ordered < 0x8000_0000u32 {
        // the omitted bits are 0 in the float
        bits = (ordered ^ 0xffff_ffffu32) - comptime!((1u32 << spare) - 1);
    }
    f32::reinterpret(bits)
}

/// The rank of the largest logit of a part.
#[cube]
pub(super) fn rank_of_part(scores: &[f32], row: &Row, part: usize, #[comptime] spare: u32) -> u32 {
    rank_of(scores[row.first_score + 2 * part], spare)
}

/// The number, or the weight, of a row's tokens at or above `rank` plus one, two and three steps.
#[cube]
fn mass_at_least<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    rank: u32,
    step: u32,
    #[comptime] weigh: bool,
    #[comptime] spare: u32,
) -> (f32, f32, f32) {
    let mut one = 0.0f32;
    let mut two = 0.0f32;
    let mut three = 0.0f32;
    for part in 0..row.parts {
        if rank_of_part(scores, row, part, spare) >= rank + step {
            let end = min((part + 1) * PART, row.vocab);
            let mut i = part * PART + UNIT_POS as usize * N::value();
            while i < end {
                let vector = logits[(row.first + i) / N::value()];
                #[unroll]
                for e in 0..N::value() {
                    let z = f32::cast_from(vector.extract(e));
                    let z_rank = rank_of(z, spare);
                    if z_rank >= rank + step {
                        let mut amount = 1.0f32;
                        if weigh {
                            amount = weight_of(z, row);
                        }
                        one += amount;
                        if z_rank >= rank + 2u32 * step {
                            two += amount;
                        }
                        if z_rank >= rank + 3u32 * step {
                            three += amount;
                        }
                    }
                }
                i += UNITS * N::value();
            }
        }
    }
    let one = reduce(lanes, one, false);
    let two = reduce(lanes, two, false);
    let three = reduce(lanes, three, false);
    (one, two, three)
}

/// The largest rank at or above which there are enough tokens, or there is enough weight.
#[cube]
fn radix_select<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    enough: f32,
    #[comptime] weigh: bool,
    #[comptime] spare: u32,
) -> u32 {
    let mut rank = 0u32;
    let mut step = comptime!(1u32 << ((31 - spare) / 2 * 2)).runtime();
    while step > 0u32 {
        let (one, two, three) = mass_at_least::<F, N>(logits, scores, lanes, row, rank, step, weigh, spare);
        if three >= enough {
            rank += 3u32 * step;
        } else if two >= enough {
            rank += 2u32 * step;
        } else if one >= enough {
            rank += step;
        }
        step >>= 2u32;
    }
    rank
}

/// The weight and the number of a row's tokens above a rank.
#[cube]
fn mass_above<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    rank: u32,
    #[comptime] spare: u32,
) -> (f32, f32) {
    let mut weight = 0.0f32;
    let mut count = 0.0f32;
    for part in 0..row.parts {
        if rank_of_part(scores, row, part, spare) > rank {
            let end = min((part + 1) * PART, row.vocab);
            let mut i = part * PART + UNIT_POS as usize * N::value();
            while i < end {
                let vector = logits[(row.first + i) / N::value()];
                #[unroll]
                for e in 0..N::value() {
                    let z = f32::cast_from(vector.extract(e));
                    if rank_of(z, spare) > rank {
                        weight += weight_of(z, row);
                        count += 1.0f32;
                    }
                }
                i += UNITS * N::value();
            }
        }
    }
    let weight = reduce(lanes, weight, false);
    let count = reduce(lanes, count, false);
    (weight, count)
}

/// The tokens that top-k, then top-p, then min-p keep of a row with a total weight of `full`.
#[cube]
pub(super) fn truncated_support<F: Float, N: Size>(
    logits: &[Vector<F, N>],
    scores: &[f32],
    lanes: &mut Shared<[f32]>,
    row: &Row,
    full: f32,
    bounds: &Bounds,
    #[comptime] truncates: Truncates,
) -> Support {
    let spare = comptime!(truncates.spare);
    // no float has rank 0
    let mut rank = 0u32;
    let mut ties = 0.0f32;
    let mut held = full;
    if comptime!(truncates.by_count) {
        rank = radix_select::<F, N>(logits, scores, lanes, row, bounds.top_k, false, spare);
        let (weight, count) = mass_above::<F, N>(logits, scores, lanes, row, rank, spare);
        ties = bounds.top_k - count;
        held = weight + ties * weight_of(value_of(rank, spare), row);
    }
    if comptime!(truncates.by_share) {
        let share = bounds.top_p * held;
        let end = radix_select::<F, N>(logits, scores, lanes, row, share, true, spare);
        let (before, _count) = mass_above::<F, N>(logits, scores, lanes, row, end, spare);
        let tied = weight_of(value_of(end, spare), row);
        let wanted = max(((share - before) / tied).ceil(), 1.0f32);
        if end > rank {
            rank = end;
            ties = wanted;
        } else if end == rank {
            ties = min(ties, wanted);
        }
    }
    let mut tied = 0.0f32;
    if rank > 0u32 {
        let weight = weight_of(value_of(rank, spare), row);
        if weight >= bounds.min_p {
            tied = weight;
        }
    }
    Support { rank, ties, tied, least: bounds.min_p }
}
