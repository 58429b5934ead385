//! 8 bits a number, a scale a row (LLM.int8: Dettmers et al., 2022, arXiv:2208.07339).

use super::words::{bytes, bytes_mut};
use firebrick_spec::QuantizedLayout;
use rayon::prelude::*;

/// The largest code.
const MAX_CODE: f32 = 127.0;

/// bitsandbytes multiplies by this and does not divide by 127.
const RECIPROCAL: f32 = 7.874_016e-3;

pub(super) fn quantize(values: &[f32], layout: QuantizedLayout, words: &mut [f32]) {
    let (codes, scales) = words.split_at_mut(layout.code_words());
    let codes = &mut bytes_mut(codes)[..values.len()];
    let cols = layout.cols.max(1);
    codes
        .par_chunks_mut(cols)
        .zip(values.par_chunks(cols))
        .zip(scales)
        .for_each(|((codes, row), scale)| *scale = encode(row, codes));
}

/// The codes of a row, and its absmax: NaN where a number is not finite.
fn encode(row: &[f32], codes: &mut [u8]) -> f32 {
    if !row.iter().all(|value| value.is_finite()) {
        codes.fill(0);
        return f32::NAN;
    }
    let absmax = row.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
    if absmax == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    let factor = MAX_CODE / absmax;
    for (code, &value) in codes.iter_mut().zip(row) {
        // of a subnormal absmax the factor may be infinite
        let x = (value * factor).clamp(-MAX_CODE, MAX_CODE);
        *code = (x.round_ties_even() as i8).cast_unsigned();
    }
    absmax
}

pub(super) fn widen(words: &[f32], layout: QuantizedLayout, first: usize, out: &mut [f32]) {
    let (codes, scales) = words.split_at(layout.code_words());
    let cols = layout.cols.max(1);
    let codes = bytes(codes)[first * cols..].chunks(cols);
    let rows = out.chunks_mut(cols).zip(codes).zip(&scales[first..]);
    for ((out, codes), &absmax) in rows {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = f32::from(code.cast_signed()) * absmax * RECIPROCAL;
        }
    }
}
