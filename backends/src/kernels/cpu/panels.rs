//! Matrices laid out for products with few rows: 32 outputs side by side, so that a core loads whole vectors of weights, in the
//! order in which it needs them, and keeps twelve rows' sums in registers. As they are, or rounded to 8 bits: then a quarter of the
//! bytes is read, and registers hold f32 again.

mod product;

use super::parallel::{CACHE_LINE, dims, elements, vectorised};
use super::tape::{exact, plain, wrap};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
use product::{End, products};
use rayon::prelude::*;
use std::fmt::{Debug, Formatter};
use std::sync::Arc;

/// Outputs of a panel.
const WIDTH: usize = 32;

/// The largest code.
const MOST: f32 = 127.0;

/// A number of each output of a panel, for one input. Whole cache lines, so that no vector lies across two.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; WIDTH]);

/// The same in 8 bits, to be multiplied by the output's scale.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Codes([i8; WIDTH]);

/// What a panel has for each of its inputs, panel by panel.
#[derive(Clone)]
enum Numbers {
    Exact(Arc<Vec<Line>>),
    /// Codes, and the scales of all outputs, filled up with zeros.
    Int8(Arc<Vec<Codes>>, Arc<Vec<f32>>),
}

/// A matrix `[outputs, inputs]` in panels `[inputs, 32]`, the last filled up with zeros. Clones share it.
#[derive(Clone)]
pub struct Panels {
    numbers: Numbers,
    outputs: usize,
    inner: usize,
}

impl Debug for Panels {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let kind = match self.numbers {
            Numbers::Exact(_) => "f32",
            Numbers::Int8(..) => "int8",
        };
        write!(f, "Panels of [{}, {}] in {kind}", self.outputs, self.inner)
    }
}

impl Panels {
    /// A copy of a matrix. `None` where it is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        let matrix = known(matrix)?;
        let [outputs, inner] = dims(&matrix);
        let count = outputs.div_ceil(WIDTH) * inner;
        let mut lines = Vec::with_capacity(count);
        let panels = lines.spare_capacity_mut()[..count].par_chunks_mut(inner.max(1));
        panels.enumerate().for_each(|(panel, lines)| {
            // as many inputs at a time as a row has in a cache line, so that all are near
            for (i, lines) in lines.chunks_mut(CACHE_LINE / 4).enumerate() {
                let mut own = [Line([0.0; WIDTH]); CACHE_LINE / 4];
                for (o, row) in rows(&matrix, panel).enumerate() {
                    for (own, &value) in own.iter_mut().zip(&row[i * (CACHE_LINE / 4)..]) {
                        own.0[o] = value;
                    }
                }
                for (line, own) in lines.iter_mut().zip(own) {
                    line.write(own);
                }
            }
        });
        // SAFETY: all are written.
        #[allow(
            unsafe_code,
            reason = "matrices are large, and zeros would be written first"
        )]
        unsafe {
            lines.set_len(count);
        }
        Some(Self {
            numbers: Numbers::Exact(Arc::new(lines)),
            outputs,
            inner,
        })
    }

    /// A copy of a matrix in 8 bits; see [`crate::kernels::Panels::quantise`].
    #[must_use]
    pub fn quantise(matrix: &Tensor<2>) -> Option<Self> {
        let matrix = known(matrix)?;
        let [outputs, inner] = dims(&matrix);
        let panels = outputs.div_ceil(WIDTH);
        let mut codes = vec![Codes([0; WIDTH]); panels * inner];
        let mut scales = vec![0.0_f32; panels * WIDTH];
        let panels = codes.par_chunks_mut(inner.max(1));
        let panels = panels.zip(scales.par_chunks_mut(WIDTH)).enumerate();
        panels.for_each_init(Vec::new, |own, (panel, (codes, scales))| {
            for (o, row) in rows(&matrix, panel).enumerate() {
                scales[o] = scale(row);
                encode(row, scales[o], own);
                for (codes, &code) in codes.iter_mut().zip(&*own) {
                    codes.0[o] = code;
                }
            }
        });
        Some(Self {
            numbers: Numbers::Int8(Arc::new(codes), Arc::new(scales)),
            outputs,
            inner,
        })
    }

    /// Whether the copy has the matrix's own numbers.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        matches!(self.numbers, Numbers::Exact(_))
    }

    /// Bytes of the copy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.numbers {
            Numbers::Exact(lines) => size_of_val(lines.as_slice()),
            Numbers::Int8(codes, scales) => {
                size_of_val(codes.as_slice()) + size_of_val(scales.as_slice())
            }
        }
    }

    /// `x · Wᵀ` of `x`, `[rows, inputs]`. `None` where `x` is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        Self::linear_each(x, [self]).map(|[y]| y)
    }

    /// The same of several matrices and one `x`.
    #[must_use]
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> Option<[Tensor<2>; N]> {
        let x = known(x)?;
        let _span = span("product", w.iter().map(|w| w.flops(&x)).sum());
        let mut out = products(&x, &w, &End::Nothing).into_iter();
        Some(w.map(|_| wrap(out.next().unwrap_or_else(|| unreachable!("one each")))))
    }

    /// `base + x · Wᵀ`.
    #[must_use]
    pub fn linear_onto(&self, base: &Tensor<2>, x: &Tensor<2>) -> Option<Tensor<2>> {
        let (base, x) = (known(base)?, known(x)?);
        let _span = span("product", self.flops(&x));
        let out = products(&x, &[self], &End::Onto(elements(&base)));
        out.into_iter().next().map(wrap)
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)`, of two matrices of one shape.
    #[must_use]
    pub fn linear_gated(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        let x = known(x)?;
        let _span = span("product", gate.flops(&x) + up.flops(&x));
        let out = products(&x, &[gate], &End::Gate(up));
        out.into_iter().next().map(wrap)
    }

    fn flops(&self, x: &FlexTensor) -> f64 {
        let [rows, inner] = dims(x);
        2.0 * (rows * inner * self.outputs) as f64
    }
}

/// What a kernel reads of a tensor: the CPU backend's f32 without a graph.
fn known(tensor: &Tensor<2>) -> Option<FlexTensor> {
    let known = exact(tensor) && tensor.dtype() == DType::F32 && !tensor.device().is_autodiff();
    known.then(|| plain(tensor.clone()))
}

/// The rows of a matrix that are the outputs of a panel.
fn rows(matrix: &FlexTensor, panel: usize) -> impl Iterator<Item = &[f32]> {
    let [outputs, inner] = dims(matrix);
    let all: &[f32] = elements(matrix);
    let first = panel * WIDTH;
    (first..outputs.min(first + WIDTH)).map(move |row| &all[row * inner..][..inner])
}

/// What a code of 1 stands for in a row; NaN where a number is not finite.
fn scale(row: &[f32]) -> f32 {
    if row.iter().all(|value| value.is_finite()) {
        row.iter()
            .fold(0.0_f32, |most, value| most.max(value.abs()))
            / MOST
    } else {
        f32::NAN
    }
}

/// The codes of a row.
fn encode(row: &[f32], scale: f32, codes: &mut Vec<i8>) {
    // numbers that are all next to nothing have no scale, and are nothing
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    codes.resize(row.len(), 0);
    vectorised(
        #[inline(always)]
        || {
            for (code, &value) in codes.iter_mut().zip(row) {
                *code = (value / divisor).round_ties_even().clamp(-MOST, MOST) as i8;
            }
        },
    );
}
