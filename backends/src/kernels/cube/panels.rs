//! Products with matrices in 8 bits, each output with a scale of its own (absmax, as of weights in LLM.int8; arXiv:2208.07339).
//!
//! Codes lie in panels of 32 outputs: a word has those of four inputs of an output, and the words of a panel's outputs lie side by
//! side, so that units side by side read neighbours. A product of few rows widens them in registers (`units`), or, in half
//! precision where there are tensor cores, in shared memory (`cores`), for codes are exact there. With many rows reading is a
//! small part of it: the matrix is widened as a whole, and gone again after the product.

mod cores;
mod units;

use super::launch::{
    RowGrid, UNITS, address, cubes, dims, elem, elementwise, empty, integers, knows, owned, plain,
    row_max, row_sum,
};
use super::matrices::{VECTOR, has_cores};
use crate::kernels::choice::{FEW_ROWS, FEW_ROWS_ON_CORES, Operation};
use crate::kernels::tape::Engine;
use crate::trace::{Span, span};
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

/// What follows a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum End {
    Nothing,
    /// It is added to what is there.
    Onto,
    /// It is the gate of another.
    Gated,
}

/// How a product is made.
enum Way {
    /// By a kernel that widens codes itself.
    Few { on_cores: bool },
    /// In tensor operations, of the matrix widened as a whole.
    Many,
}

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
        let (x, way) = self.way(x)?;
        let _span = self.span(&x, 1);
        let Way::Few { on_cores } = way else {
            let wide = self.widened(x.dtype);
            return Some(Cube::close(x).matmul(wide.transpose()));
        };
        let out = empty(&x, [dims::<2>(&x)[0], self.outputs], x.dtype);
        self.multiply(self, x, &out, End::Nothing, on_cores);
        Some(Cube::close(out))
    }

    /// `base + x · Wᵀ` with few rows, in the base's place where nobody else holds it. Gives the base back where there are many, or
    /// the tensors are not known.
    pub fn linear_onto(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        let alike = base.dtype() == x.dtype() && !base.device().is_autodiff();
        let Some((x, Way::Few { on_cores })) = self.way(x).filter(|_| alike) else {
            return Err(base);
        };
        let _span = self.span(&x, 1);
        let out = owned(plain(base));
        self.multiply(self, x, &out, End::Onto, on_cores);
        Ok(Cube::close(out))
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)` of two matrices of one shape with few rows. `None` as in [`Self::linear_onto`].
    pub fn linear_gated(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        let shapes = [gate, up].map(|codes| [codes.outputs, codes.inner]);
        let (x, way) = gate.way(x).filter(|_| shapes[0] == shapes[1])?;
        let Way::Few { on_cores } = way else {
            return None;
        };
        let _span = gate.span(&x, 2);
        let out = empty(&x, [dims::<2>(&x)[0], gate.outputs], x.dtype);
        gate.multiply(up, x, &out, End::Gated, on_cores);
        Some(Cube::close(out))
    }

    fn span(&self, x: &CubeTensor, matrices: usize) -> Span {
        let [rows, inner] = dims(x);
        span(
            "product",
            2.0 * (matrices * rows * inner * self.outputs) as f64,
        )
    }

    /// The rows, and how products with so many are made, where they are.
    fn way(&self, x: &Tensor<2>) -> Option<(CubeTensor, Way)> {
        if !knows(Operation::Quantised, x) || x.device().is_autodiff() {
            return None;
        }
        let [rows, inner] = x.dims();
        debug_assert_eq!(inner, self.inner);
        let x = plain(x.clone());
        let on_cores = inner.is_multiple_of(VECTOR) && has_cores(&x, cores::LEAST_SHARED);
        let few = if on_cores {
            FEW_ROWS_ON_CORES
        } else {
            FEW_ROWS
        };
        let way = if rows <= few {
            Way::Few { on_cores }
        } else {
            Way::Many
        };
        Some((x, way))
    }

    /// The product with few rows, with the sums of another matrix beside it where it is gated.
    fn multiply(&self, up: &Self, x: CubeTensor, out: &CubeTensor, end: End, on_cores: bool) {
        let [rows, inner] = dims(&x);
        let [words, up_words] = [self, up].map(|codes| integers(&codes.words));
        let [scales, up_scales] = [self, up].map(|codes| plain(codes.scales.clone()));
        let address = address([&x, &words, out]);
        let panels = self.outputs.div_ceil(PANEL);
        macro_rules! multiply {
            ($kernels:ident, $vector:expr, $blocks:expr, $tiles:expr, $size:expr) => {
                $kernels::multiply::launch(
                    &out.client,
                    cubes(out, $tiles * $blocks),
                    CubeDim::new_1d(UNITS as u32),
                    address,
                    $vector,
                    x.into_buffer_arg(),
                    words.into_buffer_arg(),
                    scales.into_buffer_arg(),
                    up_words.into_buffer_arg(),
                    up_scales.into_buffer_arg(),
                    out.clone().into_buffer_arg(),
                    rows,
                    inner,
                    self.outputs,
                    inner.div_ceil(WORD),
                    $tiles,
                    end,
                    $size,
                    elem(out),
                )
            };
        }
        if on_cores {
            let tiles = rows.div_ceil(cores::ROWS);
            let wide = cores::wide(panels, tiles, end, out);
            multiply!(cores, VECTOR, panels.div_ceil(wide), tiles, wide);
        } else {
            let most = rows.next_power_of_two().min(units::most_rows(end));
            multiply!(units, WORD, panels, rows.div_ceil(most), most);
        }
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

/// x σ(x).
#[cube]
fn silu(x: f32) -> f32 {
    x / (1.0f32 + (-x).exp())
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
