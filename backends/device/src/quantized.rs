//! Matrices in few bits on the host: quantised and widened exactly as bitsandbytes does.
//!
//! A matrix is one buffer of 32-bit words, laid out as [`QuantizedLayout`] says. Buffers travel as f32 tensors whose
//! elements have these bits: whatever copies tensors copies them, and nothing computes with the elements.

mod int8;
mod nf4;
#[cfg(test)]
mod tests;
mod words;

pub use nf4::{NF4, Nf4Parts, dynamic_map, nf4_from_parts};

use crate::transfer::HostTensor;
use firebrick_spec::{BaseFormat, QuantizedLayout};
use rayon::prelude::*;

/// Rows of a task.
const ROWS: usize = 16;

/// Quantises matrices of f32 numbers, in row-major order, on all cores: the words of their buffers, `[matrices,
/// words]`, each by itself.
///
/// - `int8`: `round(a · (127 / absmax))` of each row, a tie to the even code (`int8_vectorwise_quant`).
/// - `nf4`: the entry of the map nearest to `a · (1 / absmax)` of each block of 64 in flat order, a tie to the lower
///   one (`quantize_4bit`); then absmax less its mean in groups of 256 blocks, likewise by the signed dynamic map
///   (`compress_statistics`). A last block or group that is shorter is divided by its absmax. The mean is summed in
///   f64. This is bitsandbytes' portable operation; its CPU kernel gives some scales a code that is not the nearest.
///
/// A row or block of zeros alone stays zeros in `int8`; in `nf4` its codes are those of 0, so it does too. A number
/// that is not finite makes NaN of its row (`int8`), or numbers that are not finite of the whole matrix (`nf4`, whose
/// scales share a mean).
pub fn quantize(values: &[f32], layout: QuantizedLayout) -> HostTensor {
    assert_eq!(values.len(), layout.matrices * layout.numbers(), "as many values as the layout has");
    let each = layout.words();
    let mut words = vec![0.0_f32; layout.matrices * each];
    let parts = words.chunks_mut(each.max(1));
    for (words, values) in parts.zip(values.chunks(layout.numbers().max(1))) {
        match layout.format {
            BaseFormat::Int8 => int8::quantize(values, layout.one(), words),
            BaseFormat::Nf4 => nf4::quantize(values, layout.one(), words),
        }
    }
    HostTensor::verbatim(words, layout.matrices)
}

/// Widens whole rows, from row `first` on, of one matrix to `out`.
///
/// - `int8`: `code · absmax · (1 / 127)`, in this order (`int8_vectorwise_dequant`).
/// - `nf4`: `map[code] · (scales[code] · absmax + offset)`, each step rounded to f32 (`dequantize_4bit`).
pub fn widen_rows(words: &[f32], layout: QuantizedLayout, first: usize, out: &mut [f32]) {
    match layout.format {
        BaseFormat::Int8 => int8::widen(words, layout, first, out),
        BaseFormat::Nf4 => nf4::widen(words, layout, first * layout.cols, out),
    }
}

/// The whole matrices that buffers stand for, in f32 and row-major order, widened on all cores.
pub fn widened(words: &[f32], layout: QuantizedLayout) -> Vec<f32> {
    let mut out = vec![0.0; layout.matrices * layout.numbers()];
    let each = out.chunks_mut(layout.numbers().max(1));
    for (out, words) in each.zip(words.chunks(layout.words().max(1))) {
        let rows = out.par_chunks_mut((ROWS * layout.cols).max(1));
        rows.enumerate().for_each(|(part, out)| widen_rows(words, layout, part * ROWS, out));
    }
    out
}
