//! Products with matrices in 8 bits, each output with a scale of its own (absmax, as of weights in LLM.int8; arXiv:2208.07339).
//!
//! Codes lie in panels of 32 outputs: a word has those of four inputs of an output, and the words of a panel's outputs lie side by
//! side, so that units side by side read neighbours. A product of few rows widens them in registers (`units`), or, in half
//! precision where there are tensor cores, in shared memory (`cores`), for codes are exact there. With many rows reading is a
//! small part of it: the matrix is widened as a whole, and gone again after the product.

mod cores;
mod units;

use super::launch::{
    RowGrid, UNITS, address, cubes, elem, elementwise, empty, integers, knows, plain, row_max,
    row_sum,
};
use super::matrices::{VECTOR, has_cores};
use crate::kernels::choice::{FEW_ROWS, FEW_ROWS_ON_CORES, Operation};
use crate::kernels::tape::Engine;
use crate::trace::span;
use burn::backend::Cube;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use std::fmt::{Debug, Formatter};

/// Outputs of a panel.
const PANEL: usize = 32;

/// Codes of a word.
const WORD: usize = 4;

/// The largest code.
const MOST: f64 = 127.0;

/// A matrix `[outputs, inputs]` in 8 bits. Clones share it.
#[derive(Clone)]
pub struct Codes {
    /// `[panels, words, 32]`; numbers beyond the last output or input are zeros.
    words: Tensor<1, Int>,
    /// Of every output of every panel what a code of 1 stands for.
    scales: Tensor<1>,
    outputs: usize,
    inner: usize,
}

impl Debug for Codes {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Codes of [{}, {}]", self.outputs, self.inner)
    }
}

impl Codes {
    /// A copy of a matrix; see [`crate::kernels::Panels::quantise`].
    pub fn quantise(matrix: &Tensor<2>) -> Option<Self> {
        if !knows(Operation::Quantised, matrix) || matrix.device().is_autodiff() {
            return None;
        }
        let [outputs, inner] = matrix.dims();
        let (panels, words) = (outputs.div_ceil(PANEL), inner.div_ceil(WORD));
        let matrix = plain(matrix.clone());
        let codes = empty(&matrix, [panels * words * PANEL], DType::I32);
        let scales = empty(&matrix, [panels * PANEL], DType::F32);
        let grid = RowGrid::of(inner);
        let dtype = elem(&matrix);
        encode::launch(
            &scales.client,
            grid.count(&scales, panels * PANEL),
            grid.dim(),
            address([&matrix]),
            matrix.into_buffer_arg(),
            codes.clone().into_buffer_arg(),
            scales.clone().into_buffer_arg(),
            outputs,
            panels * PANEL,
            inner,
            words,
            f32::NAN,
            grid.units,
            grid.rows,
            dtype,
        );
        Some(Self {
            words: Tensor::from_primitive::<Cube>(codes),
            scales: Cube::close(scales),
            outputs,
            inner,
        })
    }

    /// Bytes of the copy.
    pub fn bytes(&self) -> usize {
        (self.words.dims()[0] + self.scales.dims()[0]) * 4
    }

    /// `x · Wᵀ` of `x`, `[rows, inputs]`, in its float type. `None` where `x` is of another backend, or has a graph.
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        if !knows(Operation::Quantised, x) || x.device().is_autodiff() {
            return None;
        }
        let [rows, inner] = x.dims();
        let _span = span("product", 2.0 * (rows * inner * self.outputs) as f64);
        let x = plain(x.clone());
        let on_cores = inner.is_multiple_of(VECTOR) && has_cores(&x, cores::SHARED_BYTES);
        let few = if on_cores {
            FEW_ROWS_ON_CORES
        } else {
            FEW_ROWS
        };
        Some(if rows <= few {
            Cube::close(self.multiplied(x, rows, on_cores))
        } else {
            let wide = self.widened(x.dtype);
            Cube::close(x).matmul(wide.transpose())
        })
    }

    /// The product with few rows.
    fn multiplied(&self, x: CubeTensor, rows: usize, on_cores: bool) -> CubeTensor {
        let out = empty(&x, [rows, self.outputs], x.dtype);
        let [words, scales] = [integers(&self.words), plain(self.scales.clone())];
        let address = address([&x, &words, &out]);
        let most = if on_cores {
            cores::ROWS
        } else {
            rows.next_power_of_two().min(units::ROWS)
        };
        let tiles = rows.div_ceil(most);
        macro_rules! multiply {
            ($kernels:ident, $vector:expr $(, $most:expr)?) => {
                $kernels::multiply::launch(
                    &out.client,
                    cubes(&out, tiles * self.outputs.div_ceil(PANEL)),
                    CubeDim::new_1d(UNITS as u32),
                    address,
                    $vector,
                    x.into_buffer_arg(),
                    words.into_buffer_arg(),
                    scales.into_buffer_arg(),
                    out.clone().into_buffer_arg(),
                    rows,
                    self.inner,
                    self.outputs,
                    self.inner.div_ceil(WORD),
                    tiles,
                    $($most,)?
                    elem(&out),
                )
            };
        }
        if on_cores {
            multiply!(cores, VECTOR);
        } else {
            multiply!(units, WORD, most);
        }
        out
    }

    /// The matrix that the codes stand for.
    fn widened(&self, dtype: DType) -> Tensor<2> {
        let codes = integers(&self.words);
        let out = empty(&codes, [self.outputs, self.inner], dtype);
        let words = self.inner.div_ceil(WORD);
        let (count, dim) = elementwise(&out, self.outputs * words);
        decode::launch(
            &out.client,
            count,
            dim,
            address([&out, &codes]),
            codes.into_buffer_arg(),
            plain(self.scales.clone()).into_buffer_arg(),
            out.clone().into_buffer_arg(),
            self.outputs,
            self.inner,
            words,
            elem(&out),
        );
        Cube::close(out)
    }
}

/// A word's code of an input.
#[cube]
fn code(word: i32, #[comptime] input: usize) -> f32 {
    // the code's sign is that of the word once it is on top
    f32::cast_from((word << comptime!(24 - 8 * input as i32)) >> 24)
}

#[cube(launch, address_type = "dynamic")]
fn encode<F: Float>(
    values: &[F],
    codes: &mut [i32],
    scales: &mut [f32],
    outputs: usize,
    padded: usize,
    inner: usize,
    words: usize,
    nan: f32,
    #[comptime] units: usize,
    #[comptime] rows: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[f32]>::new_slice(comptime!(units * rows));
    let output = CUBE_POS * rows + UNIT_POS_Y as usize;
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
    let most = row_max(&mut lanes, most, units);
    let bad = row_sum(&mut lanes, bad, units);
    let mut scale = most / f32::new(MOST);
    // numbers that are all next to nothing have no scale, and are nothing
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
                    let x = clamp(x.round(), f32::new(-MOST), f32::new(MOST));
                    packed |= (i32::cast_from(x) & 255i32) << comptime!(8 * j as i32);
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

#[cube(launch, address_type = "dynamic")]
fn decode<F: Float>(
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
