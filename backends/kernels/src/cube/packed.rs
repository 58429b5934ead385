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
use super::launch::{Grid, RowGrid, detached, dims, elem, empty, integers, into_writable, launch, supports};
use super::product::PRODUCTS;
use crate::autodiff::KernelBackend;
use crate::backend::PackedMatrix;
use crate::choice::{FEW_ROWS, FEW_ROWS_ON_CORES, Operation};
use burn::backend::Cube;
use burn::tensor::{DType, Int, Tensor};
use burn_cubecl::tensor::CubeTensor;
use codes::{Epilogue, PANEL, WORD, decode, encode};
use firebrick_device::trace::{Span, span};
use std::any::Any;
use std::fmt::{Debug, Formatter};

/// How a product is computed.
enum Algorithm {
    /// By a kernel that widens codes as it multiplies, for few rows.
    Fused { on_tensor_cores: bool },
    /// In tensor operations, from the matrix widened as a whole.
    Widened,
}

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
        if !supports(Operation::Quantised, matrix) || matrix.device().is_autodiff() {
            return None;
        }
        let [outputs, inner] = matrix.dims();
        let (panels, words) = (outputs.div_ceil(PANEL), inner.div_ceil(WORD));
        let matrix = detached(matrix.clone());
        let codes = empty(&matrix, [panels * words * PANEL], DType::I32);
        let scales = empty(&matrix, [panels * PANEL], DType::F32);
        let grid = RowGrid::of(inner);
        let dtype = elem(&matrix);
        let cubes = grid.cubes([&matrix], panels * PANEL);
        launch!(encode, cubes, [matrix, &codes, &scales], outputs, panels * PANEL, inner, words, f32::NAN, grid, dtype,);
        Some(Self { words: Tensor::from_primitive::<Cube>(codes), scales: Cube::tensor(scales), outputs, inner })
    }

    fn span(&self, x: &CubeTensor, matrices: usize) -> Span {
        let [rows, inner] = dims(x);
        span("product", 2.0 * (matrices * rows * inner * self.outputs) as f64)
    }

    /// The rows, and how their product is computed; `None` where it is not.
    fn prepare(&self, x: &Tensor<2>) -> Option<(CubeTensor, Algorithm)> {
        if !supports(Operation::Quantised, x) || x.device().is_autodiff() {
            return None;
        }
        let [rows, inner] = x.dims();
        debug_assert_eq!(inner, self.inner);
        let x = detached(x.clone());
        let on_tensor_cores = inner.is_multiple_of(VECTOR) && has_tensor_cores(&x, tensor_core::LEAST_SHARED);
        let few = if on_tensor_cores { FEW_ROWS_ON_CORES } else { FEW_ROWS };
        let algorithm = if rows <= few { Algorithm::Fused { on_tensor_cores } } else { Algorithm::Widened };
        Some((x, algorithm))
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

    fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        let (x, algorithm) = self.prepare(x)?;
        let _span = self.span(&x, 1);
        let Algorithm::Fused { on_tensor_cores } = algorithm else {
            let wide = self.widened(x.dtype);
            return Some(PRODUCTS.matmul_nt(&Cube::tensor(x), &wide));
        };
        let out = empty(&x, [dims::<2>(&x)[0], self.outputs], x.dtype);
        self.multiply(self, &x, &out, Epilogue::None, on_tensor_cores);
        Some(Cube::tensor(out))
    }

    /// Few rows only.
    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        let alike = base.dtype() == x.dtype() && !base.device().is_autodiff();
        let prepared = self.prepare(x).filter(|_| alike);
        let Some((x, Algorithm::Fused { on_tensor_cores })) = prepared else {
            return Err(base);
        };
        let _span = self.span(&x, 1);
        let out = into_writable(detached(base));
        self.multiply(self, &x, &out, Epilogue::Add, on_tensor_cores);
        Ok(Cube::tensor(out))
    }

    /// Few rows only.
    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Option<Tensor<2>> {
        let up: &dyn Any = up;
        let up: &Self = up.downcast_ref()?;
        let shapes = [self, up].map(|matrix| [matrix.outputs, matrix.inner]);
        let (x, algorithm) = self.prepare(x).filter(|_| shapes[0] == shapes[1])?;
        let Algorithm::Fused { on_tensor_cores } = algorithm else {
            return None;
        };
        let _span = self.span(&x, 2);
        let out = empty(&x, [dims::<2>(&x)[0], self.outputs], x.dtype);
        self.multiply(up, &x, &out, Epilogue::SwiGlu, on_tensor_cores);
        Some(Cube::tensor(out))
    }
}
