//! `NormalFloat` of 4 bits in blocks, with scales of 8 bits (`QLoRA`: Dettmers et al., 2023, arXiv:2305.14314).

use super::words::{bytes, bytes_mut};
use crate::transfer::HostTensor;
use firebrick_spec::quantized::{CODE_MAP, NF4_BLOCK, NF4_GROUP, SCALE_MAP};
use firebrick_spec::{BaseFormat, QuantizedLayout};
use rayon::prelude::*;
use std::sync::LazyLock;

/// The map of 4-bit codes: quantiles of the normal distribution, scaled to [-1, 1] (bitsandbytes' `CODE["nf4"]`).
pub const NF4: [f32; CODE_MAP] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of 0.
const ZERO: u8 = 7;

/// The smallest magnitude that a block is divided by.
const SMALLEST: f32 = 1e-38;

/// Blocks of a task.
const BLOCKS: usize = 256;

/// bitsandbytes' `create_dynamic_map`: seven decades, each cut into twice as many equal parts as the one below it,
/// entries in their middles; then 0 and 1. Rounded as torch rounds it. The signed map has scales of `nf4` and first
/// moments, the other one second moments.
pub fn dynamic_map(signed: bool) -> [f32; SCALE_MAP] {
    let decades = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1e0];
    let mut values = Vec::with_capacity(SCALE_MAP);
    for (i, decade) in decades.into_iter().enumerate() {
        let parts = if signed { 1_u16 << i } else { 2 << i };
        let step = (1.0 - 0.1_f32) / f32::from(parts);
        // torch.linspace counts from the nearer end
        let boundary = |k: u16| {
            if 2 * k <= parts { step.mul_add(f32::from(k), 0.1) } else { (-step).mul_add(f32::from(parts - k), 1.0) }
        };
        for k in 0..parts {
            let value = f32::midpoint(boundary(k), boundary(k + 1)) * decade;
            values.push(value);
            if signed {
                values.push(-value);
            }
        }
    }
    values.extend([0.0, 1.0]);
    values.sort_by(f32::total_cmp);
    let mut map = [0.0; SCALE_MAP];
    map.copy_from_slice(&values);
    map
}

/// Numbers in the middle between two neighbours of a sorted map, where codes change: a number belongs to the next entry
/// where it is larger (`torch.bucketize`).
fn midpoints(map: &[f32]) -> Vec<f32> {
    let middle = |pair: &[f32]| f32::midpoint(pair[0], pair[1]);
    map.windows(2).map(middle).collect()
}

/// Numbers of a block scaled to [-1, 1] as bitsandbytes' portable operation does it, and their largest magnitude. A
/// block that is not whole is divided by that; others are multiplied by its reciprocal.
fn scaled(block: &[f32], whole: usize) -> (f32, impl Iterator<Item = f32> + '_) {
    let absmax = largest(block);
    let (top, is_whole) = (at_least_smallest(absmax), block.len() == whole);
    let factor = 1.0 / top;
    let scaled = block.iter().map(move |&value| {
        let x = if is_whole { value * factor } else { value / top };
        x.clamp(-1.0, 1.0)
    });
    (if is_whole { absmax } else { top }, scaled)
}

/// The larger of a magnitude and [`SMALLEST`]; NaN stays NaN.
fn at_least_smallest(absmax: f32) -> f32 {
    if absmax < SMALLEST { SMALLEST } else { absmax }
}

pub(super) fn quantize(values: &[f32], layout: QuantizedLayout, words: &mut [f32]) {
    static MIDPOINTS: LazyLock<Vec<f32>> = LazyLock::new(|| midpoints(&NF4));
    let midpoints = MIDPOINTS.as_slice();
    let (codes, rest) = words.split_at_mut(layout.code_words());
    let codes = &mut bytes_mut(codes)[..values.len().div_ceil(2)];
    let mut absmax = vec![0.0_f32; layout.blocks()];
    codes
        .par_chunks_mut(BLOCKS * NF4_BLOCK / 2)
        .zip(values.par_chunks(BLOCKS * NF4_BLOCK))
        .zip(absmax.par_chunks_mut(BLOCKS))
        .for_each(|((codes, values), absmax)| {
            let codes = codes.chunks_mut(NF4_BLOCK / 2);
            let blocks = codes.zip(values.chunks(NF4_BLOCK)).zip(absmax);
            for ((codes, block), absmax) in blocks {
                *absmax = encode(block, midpoints, codes);
            }
        });
    encode_scales(&mut absmax, layout, rest);
}

/// The codes of a block, and its absmax: infinite or NaN where a number is.
fn encode(block: &[f32], midpoints: &[f32], codes: &mut [u8]) -> f32 {
    // the place behind an odd number of codes has that of 0
    let mut nearest = [ZERO; NF4_BLOCK];
    let (absmax, scaled) = scaled(block, NF4_BLOCK);
    for (code, x) in nearest.iter_mut().zip(scaled) {
        // counted, not searched: that is vectorised
        *code = midpoints.iter().map(|&middle| u8::from(x > middle)).sum();
    }
    for (byte, pair) in codes.iter_mut().zip(nearest.chunks_exact(2)) {
        *byte = (pair[0] << 4) | pair[1];
    }
    absmax
}

/// The largest magnitude; NaN where a number is.
fn largest(values: &[f32]) -> f32 {
    let magnitudes = values.iter().map(|value| value.abs());
    magnitudes.fold(0.0, |most, value| {
        // f32::max would drop NaN
        if value.is_nan() || value > most { value } else { most }
    })
}

/// The part of a buffer behind the codes: scales less their mean, in 8 bits.
fn encode_scales(absmax: &mut [f32], layout: QuantizedLayout, rest: &mut [f32]) {
    static MIDPOINTS: LazyLock<Vec<f32>> = LazyLock::new(|| midpoints(&dynamic_map(true)));
    let sum: f64 = absmax.iter().copied().map(f64::from).sum();
    let offset = (sum / absmax.len().max(1) as f64) as f32;
    for scale in absmax.iter_mut() {
        *scale -= offset;
    }
    let (codes, rest) = rest.split_at_mut(layout.groups_at() - layout.code_words());
    let (groups, rest) = rest.split_at_mut(layout.groups());
    let codes = bytes_mut(codes).chunks_mut(NF4_GROUP);
    for ((codes, scales), group) in codes.zip(absmax.chunks(NF4_GROUP)).zip(groups) {
        let (top, scaled) = scaled(scales, NF4_GROUP);
        for (code, x) in codes.iter_mut().zip(scaled) {
            *code = MIDPOINTS.partition_point(|&middle| x > middle) as u8;
        }
        *group = top;
    }
    rest[0] = offset;
    rest[1..=SCALE_MAP].copy_from_slice(&dynamic_map(true));
    rest[1 + SCALE_MAP..].copy_from_slice(&NF4);
}

/// Widens numbers from the flat index `first` on.
pub(super) fn widen(words: &[f32], layout: QuantizedLayout, first: usize, out: &mut [f32]) {
    let (codes, rest) = words.split_at(layout.code_words());
    let codes = bytes(codes);
    let scales = bytes(&rest[..layout.groups_at() - layout.code_words()]);
    let groups = &words[layout.groups_at()..];
    let offset = words[layout.offset_at()];
    let scale_map = &words[layout.scale_map_at()..][..SCALE_MAP];
    let code_map = &words[layout.code_map_at()..][..CODE_MAP];
    let (mut at, end) = (first, first + out.len());
    let mut rest = out;
    while at < end {
        let block = at / NF4_BLOCK;
        // bitsandbytes widens scales by one kernel and adds the offset by another: both results are rounded
        let scaled = scale_map[usize::from(scales[block])] * groups[block / NF4_GROUP];
        let absmax = scaled + offset;
        let entries: [f32; CODE_MAP] = std::array::from_fn(|code| code_map[code] * absmax);
        let stop = end.min((block + 1) * NF4_BLOCK);
        let (part, others) = rest.split_at_mut(stop - at);
        widen_block(codes, at, &entries, part);
        (at, rest) = (stop, others);
    }
}

/// Numbers of one block, from the flat index `at` on.
fn widen_block(codes: &[u8], at: usize, entries: &[f32; CODE_MAP], out: &mut [f32]) {
    let upper = |byte: u8| entries[usize::from(byte >> 4)];
    let lower = |byte: u8| entries[usize::from(byte & 15)];
    let odd = out.len().min(at % 2);
    let (first, rest) = out.split_at_mut(odd);
    if let [first] = first {
        *first = lower(codes[at / 2]);
    }
    // whole bytes from here on
    let codes = &codes[at.div_ceil(2)..];
    let (pairs, last) = rest.as_chunks_mut::<2>();
    for (pair, &byte) in pairs.iter_mut().zip(codes) {
        *pair = [upper(byte), lower(byte)];
    }
    if let [last] = last {
        *last = upper(codes[pairs.len()]);
    }
}

/// Tensors that bitsandbytes stores for a matrix in `nf4`.
#[derive(Clone, Copy, Debug)]
pub struct Nf4Parts<'a> {
    /// `weight`: two codes a byte.
    pub codes: &'a [u8],
    /// `weight.absmax`: the code of every block's scale.
    pub scales: &'a [u8],
    /// `weight.nested_absmax`.
    pub groups: &'a [f32],
    /// `nested_offset` of `weight.quant_state.bitsandbytes__nf4`.
    pub offset: f32,
    /// `weight.nested_quant_map`.
    pub scale_map: &'a [f32],
    /// `weight.quant_map`.
    pub code_map: &'a [f32],
}

/// The buffer of a matrix that bitsandbytes has quantised, without another rounding.
///
/// # Errors
/// Names the part whose length is not that of a matrix of this shape.
pub fn nf4_from_parts(shape: [usize; 2], parts: Nf4Parts<'_>) -> Result<HostTensor, String> {
    let layout = QuantizedLayout::new(BaseFormat::Nf4, shape);
    for (name, len, expected) in [
        ("weight", parts.codes.len(), layout.numbers().div_ceil(2)),
        ("weight.absmax", parts.scales.len(), layout.blocks()),
        ("weight.nested_absmax", parts.groups.len(), layout.groups()),
        ("weight.nested_quant_map", parts.scale_map.len(), SCALE_MAP),
        ("weight.quant_map", parts.code_map.len(), CODE_MAP),
    ] {
        if len != expected {
            return Err(format!(
                "{name} has {len} elements, but a matrix of shape {shape:?} in blocks of {NF4_BLOCK} has {expected}"
            ));
        }
    }
    let mut words = vec![0.0_f32; layout.words()];
    let (codes, rest) = words.split_at_mut(layout.code_words());
    bytes_mut(codes)[..parts.codes.len()].copy_from_slice(parts.codes);
    let (scales, rest) = rest.split_at_mut(layout.groups_at() - layout.code_words());
    bytes_mut(scales)[..parts.scales.len()].copy_from_slice(parts.scales);
    let (groups, rest) = rest.split_at_mut(layout.groups());
    groups.copy_from_slice(parts.groups);
    rest[0] = parts.offset;
    rest[1..=SCALE_MAP].copy_from_slice(parts.scale_map);
    rest[1 + SCALE_MAP..].copy_from_slice(parts.code_map);
    Ok(HostTensor::verbatim(words, 1))
}
