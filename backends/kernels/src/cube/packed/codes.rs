//! The layout of 8-bit codes, and the kernels that write and widen them.

use crate::cube::prelude::*;

/// Outputs of a panel.
pub(super) const PANEL: usize = 32;

/// Codes of a word, an i32.
pub(super) const WORD: usize = 4;

/// The largest code.
const MAX_CODE: f64 = 127.0;

/// Operation on a product before it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    None,
    /// It is added to what is there.
    Add,
    /// It gates the product with a second matrix, by `silu`.
    SwiGlu,
}

/// The code of an input in a word.
#[cube]
pub(crate) fn code(word: i32, #[comptime] input: usize) -> f32 {
    // shifted to the top and back, which extends the sign
    f32::cast_from((word << comptime!(24 - 8 * input as i32)) >> 24)
}

/// A code in its place of a word.
#[cube]
pub(crate) fn placed(code: f32, #[comptime] place: usize) -> i32 {
    (i32::cast_from(code) & 255i32) << comptime!(8 * place as i32)
}

/// x σ(x).
#[cube]
pub(super) fn silu(x: f32) -> f32 {
    x / (1.0f32 + (-x).exp())
}

/// Codes and scales of a matrix `[outputs, inner]`. A row of units has an output, up to `padded`.
#[cube(launch, address_type = "dynamic")]
pub(super) fn encode<F: Float>(
    values: &[F],
    codes: &mut [i32],
    scales: &mut [f32],
    outputs: usize,
    padded: usize,
    inner: usize,
    words: usize,
    nan: f32,
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let units = comptime!(grid.units);
    let mut lanes = row_lanes(grid);
    let output = row_index(grid);
    let lane = UNIT_POS_X as usize;
    let first = output * inner;
    let mut most = 0.0f32;
    let mut bad = 0.0f32;
    if output < outputs {
        let mut i = lane;
        while i < inner {
            let x = f32::cast_from(values[first + i]);
            if x.is_nan() || x.is_inf() {
                bad = 1.0f32;
            } else {
                most = max(most, x.abs());
            }
            i += units;
        }
    }
    let most = row_max::<f32>(&mut lanes, most, units);
    let bad = row_sum(&mut lanes, bad, units);
    let mut scale = most / f32::new(MAX_CODE);
    // where the scale underflows to 0, all codes are 0
    let mut divisor = scale;
    if scale == 0.0f32 {
        divisor = 1.0f32;
    }
    if output < padded {
        let at = output / PANEL * words * PANEL + output % PANEL;
        let mut word = lane;
        while word < words {
            let mut packed = 0i32;
            #[unroll]
            for j in 0..WORD {
                let input = word * WORD + j;
                if output < outputs && input < inner && bad == 0.0f32 {
                    let x = f32::cast_from(values[first + input]) / divisor;
                    let x = clamp(x.round(), f32::new(-MAX_CODE), f32::new(MAX_CODE));
                    packed |= placed(x, j);
                }
            }
            codes[at + word * PANEL] = packed;
            word += units;
        }
        if lane == 0 {
            if bad > 0.0f32 {
                scale = nan;
            }
            scales[output] = scale;
        }
    }
}

/// The matrix `[outputs, inner]` of codes and scales. A unit has a word.
#[cube(launch, address_type = "dynamic")]
pub(super) fn decode<F: Float>(
    codes: &[i32],
    scales: &[f32],
    out: &mut [F],
    outputs: usize,
    inner: usize,
    words: usize,
    #[define(F)] _dtype: ElemType,
) {
    let output = ABSOLUTE_POS / words;
    let word = ABSOLUTE_POS % words;
    if output < outputs {
        let packed = codes[(output / PANEL * words + word) * PANEL + output % PANEL];
        let scale = scales[output];
        #[unroll]
        for j in 0..WORD {
            let input = word * WORD + j;
            if input < inner {
                out[output * inner + input] = F::cast_from(code(packed, j) * scale);
            }
        }
    }
}
