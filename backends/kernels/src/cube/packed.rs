//! Products with matrices in 8 bits, each output with a scale of its own (absmax, as of weights in LLM.int8;
//! arXiv:2208.07339).
//!
//! Codes are stored in panels of 32 outputs: a word has the codes of four inputs of one output, and the words of a
//! panel's outputs are adjacent, so that reads coalesce. A product with few rows widens codes in registers (`simt`),
//! or, in half precision, which holds them exactly, in shared memory for tensor cores (`tensor_core`). With many rows,
//! reading is a small part of the work: the whole matrix is widened for a product in tensor operations, and freed
//! again.

pub(super) mod codes;
mod simt;
mod tensor_core;

use super::cmma::{VECTOR, has_tensor_cores};
use super::prelude::*;
use crate::backend::PackedMatrix;
use crate::choice::{MAX_FUSED_ROWS, MAX_FUSED_ROWS_ON_CORES};
use crate::operations::products::matmul;
use crate::shapes::Transposed;
use burn::tensor::Int;
use codes::{Epilogue, PANEL, WORD, decode, encode};
use firebrick_device::trace::Span;
use std::any::Any;
use std::fmt::{Debug, Formatter};

/// A matrix `[outputs, inputs]` in 8 bits.
pub(crate) struct QuantizedMatrix {
    /// `[panels, words, 32]`; codes beyond the last output or input are 0.
    words: Tensor<1, Int>,
    /// Every output's scale, `[panels · 32]`.
    scales: Tensor<1>,
    outputs: usize,
    inner: usize,
}

impl Debug for QuantizedMatrix {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "QuantizedMatrix of [{}, {}]", self.outputs, self.inner)
    }
}

impl QuantizedMatrix {
    /// Quantises a matrix; see [`crate::PackedWeights::quantize`].
    pub(crate) fn quantize(matrix: &Tensor<2>) -> Option<Self> {
        if !plain(Operation::Quantised, &[matrix]) {
            return None;
        }
        let [outputs, inner] = matrix.dims();
        let (panels, words) = (outputs.div_ceil(PANEL), inner.div_ceil(WORD));
        let matrix = detached(matrix.clone());
        let codes = empty(&matrix, [panels * words * PANEL], DType::I32);
        let scales = empty(&matrix, [panels * PANEL], DType::F32);
        let grid = RowGrid::new(inner);
        let dtype = elem(&matrix);
        let cubes = grid.cubes([&matrix], panels * PANEL);
        launch!(encode, cubes, [matrix, &codes, &scales], outputs, panels * PANEL, inner, words, f32::NAN, grid, dtype,);
        Some(Self { words: Tensor::from_primitive::<Cube>(codes), scales: Cube::tensor(scales), outputs, inner })
    }

    fn span(&self, x: &Tensor<2>, matrices: usize) -> Span {
        let [rows, inner] = x.dims();
        span("product", 2.0 * (matrices * rows * inner * self.outputs) as f64)
    }

    /// Returns true if a kernel widens codes for tensor cores.
    fn on_tensor_cores(&self, x: &Tensor<2>) -> bool {
        let x = Cube::primitive(x.clone());
        self.inner.is_multiple_of(VECTOR) && has_tensor_cores(&x, tensor_core::MIN_SHARED_BYTES)
    }

    /// Returns true if a kernel widens codes as it multiplies these rows; else the matrix is widened as a whole.
    fn is_fused(&self, x: &Tensor<2>) -> bool {
        let [rows, inner] = x.dims();
        debug_assert_eq!(inner, self.inner);
        rows <= if self.on_tensor_cores(x) { MAX_FUSED_ROWS_ON_CORES } else { MAX_FUSED_ROWS }
    }

    /// [`Self::multiply`] into a new tensor.
    fn multiplied(&self, up: &Self, x: &Tensor<2>, epilogue: Epilogue) -> Tensor<2> {
        let rows = detached(x.clone());
        let out = empty(&rows, [x.dims()[0], self.outputs], rows.dtype);
        self.multiply(up, &rows, &out, epilogue, self.on_tensor_cores(x));
        Cube::tensor(out)
    }

    /// The fused product, with that of `up` beside it where it is gated.
    fn multiply(&self, up: &Self, x: &CubeTensor, out: &CubeTensor, epilogue: Epilogue, on_tensor_cores: bool) {
        let [rows, inner] = dims(x);
        let [words, up_words] = [self, up].map(|codes| integers(&codes.words));
        let [scales, up_scales] = [self, up].map(|codes| detached(codes.scales.clone()));
        let panels = self.outputs.div_ceil(PANEL);
        macro_rules! multiply {
            ($kernels:ident, $vector:path, $blocks:expr, $tiles:expr, $size:expr) => {
                launch!(
                    $kernels::multiply,
                    Grid::cubes([x, &words, out], $tiles * $blocks),
                    $vector,
                    [x, &words, scales, up_words, up_scales, out],
                    rows,
                    inner,
                    self.outputs,
                    inner.div_ceil(WORD),
                    $tiles,
                    epilogue,
                    $size,
                    elem(out),
                )
            };
        }
        if on_tensor_cores {
            let tiles = rows.div_ceil(tensor_core::ROWS);
            let wide = tensor_core::wide(panels, tiles, epilogue, out);
            multiply!(tensor_core, VECTOR, panels.div_ceil(wide), tiles, wide);
        } else {
            let most = rows.next_power_of_two().min(simt::most_rows(epilogue));
            multiply!(simt, WORD, panels, rows.div_ceil(most), most);
        }
    }

    /// The matrix that the codes represent, in a float type.
    fn widened(&self, dtype: DType) -> Tensor<2> {
        let codes = integers(&self.words);
        let out = empty(&codes, [self.outputs, self.inner], dtype);
        let words = self.inner.div_ceil(WORD);
        let scales = detached(self.scales.clone());
        let grid = Grid::elements([&out, &codes], self.outputs * words);
        launch!(decode, grid, [codes, scales, &out], self.outputs, self.inner, words, elem(&out));
        Cube::tensor(out)
    }
}

impl PackedMatrix for QuantizedMatrix {
    fn bytes(&self) -> usize {
        (self.words.dims()[0] + self.scales.dims()[0]) * 4
    }

    fn is_exact(&self) -> bool {
        false
    }

    fn takes(&self, x: &Tensor<2>) -> bool {
        plain(Operation::Quantised, &[x])
    }

    /// Few rows only.
    fn fuses(&self, x: &Tensor<2>) -> bool {
        self.is_fused(x)
    }

    fn linear(&self, x: &Tensor<2>) -> Tensor<2> {
        let _span = self.span(x, 1);
        if self.is_fused(x) {
            return self.multiplied(self, x, Epilogue::None);
        }
        matmul(x, &self.widened(x.dtype()), Transposed::Right)
    }

    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Tensor<2> {
        let _span = self.span(x, 1);
        let out = into_writable(detached(base));
        self.multiply(self, &detached(x.clone()), &out, Epilogue::Add, self.on_tensor_cores(x));
        Cube::tensor(out)
    }

    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Tensor<2> {
        let up: &dyn Any = up;
        let up: &Self = up.downcast_ref().unwrap_or_else(|| unreachable!("matrices on one device are packed alike"));
        let _span = self.span(x, 2);
        self.multiplied(up, x, Epilogue::SwiGlu)
    }
}
