//! A matrix copied into panels: exactly, or quantized to 8 bits.

use crate::cpu::prelude::*;
use std::fmt::{Debug, Formatter};

/// Outputs of a panel.
pub(super) const WIDTH: usize = 32;

/// The largest 8-bit code.
const MAX_CODE: f32 = 127.0;

/// The weights of one input and all outputs of a panel. Aligned to cache lines, so that no vector crosses two.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(super) struct LineF32(pub [f32; WIDTH]);

/// A line in 8 bits, to be multiplied by each output's scale.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(super) struct LineI8(pub [i8; WIDTH]);

/// The lines of all inputs, panel by panel.
pub(super) enum Lines {
    Exact(Vec<LineF32>),
    /// Codes, and the scales of all outputs, padded with zeros to whole panels.
    Int8(Vec<LineI8>, Vec<f32>),
}

/// A matrix `[outputs, inputs]` in panels `[inputs, 32]`, the last padded with zeros.
pub(crate) struct PanelMatrix {
    pub(super) lines: Lines,
    pub(super) outputs: usize,
    pub(super) inner: usize,
}

impl Debug for PanelMatrix {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let kind = match self.lines {
            Lines::Exact(_) => "f32",
            Lines::Int8(..) => "int8",
        };
        write!(f, "PanelMatrix of [{}, {}] in {kind}", self.outputs, self.inner)
    }
}

impl PanelMatrix {
    /// A copy of a matrix. `None` where it is not the CPU backend's f32, or has a graph.
    pub(crate) fn pack(matrix: &Tensor<2>) -> Option<Self> {
        let matrix = is_plain_f32(matrix).then(|| detached(matrix.clone()))?;
        let [outputs, inner] = dims(&matrix);
        let count = outputs.div_ceil(WIDTH) * inner;
        let mut lines = Vec::with_capacity(count);
        let panels = lines.spare_capacity_mut()[..count].par_chunks_mut(inner.max(1));
        panels.enumerate().for_each(|(panel, lines)| {
            // as many inputs at a time as a cache line of a row has
            for (i, lines) in lines.chunks_mut(CACHE_LINE / 4).enumerate() {
                let mut tile = [LineF32([0.0; WIDTH]); CACHE_LINE / 4];
                for (o, row) in rows(&matrix, panel).enumerate() {
                    for (tile, &value) in tile.iter_mut().zip(&row[i * (CACHE_LINE / 4)..]) {
                        tile.0[o] = value;
                    }
                }
                for (line, tile) in lines.iter_mut().zip(tile) {
                    line.write(tile);
                }
            }
        });
        // SAFETY: all elements were written.
        unsafe {
            lines.set_len(count);
        }
        Some(Self { lines: Lines::Exact(lines), outputs, inner })
    }

    /// A copy of a matrix in 8 bits; see [`crate::PackedWeights::quantize`].
    pub(crate) fn quantize(matrix: &Tensor<2>) -> Option<Self> {
        let matrix = is_plain_f32(matrix).then(|| detached(matrix.clone()))?;
        let [outputs, inner] = dims(&matrix);
        let panels = outputs.div_ceil(WIDTH);
        let mut codes = vec![LineI8([0; WIDTH]); panels * inner];
        let mut scales = vec![0.0_f32; panels * WIDTH];
        let panels = codes.par_chunks_mut(inner.max(1));
        let panels = panels.zip(scales.par_chunks_mut(WIDTH)).enumerate();
        panels.for_each_init(Vec::new, |scratch, (panel, (codes, scales))| {
            for (o, row) in rows(&matrix, panel).enumerate() {
                scales[o] = scale(row);
                encode(row, scales[o], scratch);
                for (codes, &code) in codes.iter_mut().zip(&*scratch) {
                    codes.0[o] = code;
                }
            }
        });
        Some(Self { lines: Lines::Int8(codes, scales), outputs, inner })
    }
}

/// Returns true if these kernels take a tensor: the CPU backend's f32 without a graph.
pub(super) fn is_plain_f32(tensor: &Tensor<2>) -> bool {
    tensor.dtype() == DType::F32 && plain(&[tensor])
}

/// The rows of a matrix that are the outputs of a panel.
fn rows(matrix: &FlexTensor, panel: usize) -> impl Iterator<Item = &[f32]> {
    let [outputs, inner] = dims(matrix);
    let values: &[f32] = elements(matrix);
    let first = panel * WIDTH;
    (first..outputs.min(first + WIDTH)).map(move |row| &values[row * inner..][..inner])
}

/// The scale of a row's codes: its absmax over 127, or NaN where a value is not finite.
fn scale(row: &[f32]) -> f32 {
    if row.iter().all(|value| value.is_finite()) {
        row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / MAX_CODE
    } else {
        f32::NAN
    }
}

/// The codes of a row.
fn encode(row: &[f32], scale: f32, codes: &mut Vec<i8>) {
    // where the scale underflows to 0, all codes are 0
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    codes.resize(row.len(), 0);
    vectorised!({
        for (code, &value) in codes.iter_mut().zip(row) {
            *code = (value / divisor).round_ties_even().clamp(-MAX_CODE, MAX_CODE) as i8;
        }
    });
}
