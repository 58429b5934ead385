//! Products of a decoding step with what stands before and after them, in half precision on NVIDIA's tensor cores from
//! Ampere on. For few rows a kernel of its own (`fused_linear.cu`) norms its input and adds its output to the residual
//! stream; the gate of an MLP is the epilogue of that kernel and, for many rows, of the product of tiles (`gemm`).
//!
//! Numbers are rounded where operations one by one round them: after the norm, the product, the gate and the addition.

use super::cuda::{
    Constant, CudaSource, GATE, PTX, compute_capability, element_types, fingerprint, gate_constant, launch_cuda,
};
use super::prelude::*;
use super::{gemm, glu, product};
use crate::operations::{RmsNorm, SquaredRows};
use cubecl::ir::attributes::BufferIOAttr::{ReadOnly, WriteOnly};
use firebrick_spec::Activation;
use std::sync::LazyLock;

const SOURCE: &str = include_str!("fused_linear/fused_linear.cu");

/// Rows up to which the kernel is used.
const MAX_ROWS: usize = product::MAX_SKINNY_ROWS;

/// Rows of a tile, and tiles of a block at most.
const SIDE: usize = 16;
const TILES: usize = 4;

/// Outputs of a block, whose squares are one sum.
const OUTPUTS: usize = super::norm::CHUNK;

/// Numbers of a load.
const EIGHT: usize = 8;

/// Compile-time parameters of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    dtype: DType,
    /// Tiles of a block's rows.
    tiles: usize,
    /// Epsilon and offset of the norm of the rows.
    norm: Option<[Constant; 2]>,
    epilogue: Epilogue,
}

/// What follows a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Epilogue {
    Nothing,
    /// The gate of outputs interleaved by eight.
    Gated(Activation),
    /// The sum with other rows, and sums of its squares.
    Added,
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        "fused_linear"
    }

    fn threads(&self) -> usize {
        UNITS
    }

    fn source(&self) -> String {
        let Self { tiles, norm, epilogue, .. } = *self;
        let [eps, offset] = norm.unwrap_or([Constant::new(0.0); 2]);
        let (activation, gated) = match epilogue {
            Epilogue::Gated(activation) => (activation, true),
            _ => (Activation::Silu, false),
        };
        let (normed, adds) = (norm.is_some(), epilogue == Epilogue::Added);
        let head = format!(
            "#define WARPGROUPS 0\nstatic const u32 TILES = {tiles};\n\
             static const bool NORMED = {normed}, GATED = {gated}, ADDS = {adds};\n\
             static const float EPS = {eps}, OFFSET = {offset};\n"
        );
        [&element_types(self.dtype), &head, PTX, &gate_constant(activation), GATE, SOURCE].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let activations = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];
            fingerprint(activations.map(|activation| {
                let epilogue = Epilogue::Gated(activation);
                Variant { dtype: DType::BF16, tiles: 1, norm: None, epilogue }.source()
            }))
        });
        *SOURCES
    }
}

/// A product of few rows with a matrix.
struct Product<'a> {
    x: &'a CubeTensor,
    w: &'a CubeTensor,
    rows: usize,
    inner: usize,
    outputs: usize,
}

impl<'a> Product<'a> {
    /// `x · Wᵀ` for contiguous `x`. `None` where the kernel does not take the tensors.
    fn of(x: &'a CubeTensor, w: &'a CubeTensor) -> Option<Self> {
        let ([rows, inner], [outputs, _]) = (dims(x), dims(w));
        let aligned = is_aligned(x) && is_aligned(w);
        let pitched = w.meta.strides()[1] == 1 && w.meta.strides()[0].is_multiple_of(EIGHT);
        let sizes = (1..=MAX_ROWS).contains(&rows) && inner % EIGHT == 0 && outputs % EIGHT == 0;
        let takes =
            is_half_on_tensor_cores(x) && x.dtype == w.dtype && x.is_contiguous() && aligned && pitched && sizes;
        takes.then_some(Self { x, w, rows, inner, outputs })
    }

    /// Tiles of a block: fewer where blocks of more would leave half of the GPU without one.
    fn tiles(&self) -> usize {
        let blocks = |tiles: usize| self.rows.div_ceil(tiles * SIDE) * self.outputs.div_ceil(OUTPUTS);
        // one, two or four, so that few kernels are compiled
        let mut tiles = self.rows.div_ceil(SIDE).min(TILES).next_power_of_two();
        while tiles > 1 && 4 * blocks(tiles) < cubes_to_fill(self.x) {
            tiles /= 2;
        }
        tiles
    }

    fn launch(
        &self,
        norm: Option<(&CubeTensor, &CubeTensor, [Constant; 2])>,
        epilogue: Epilogue,
        base: &CubeTensor,
        [out, squares]: [&CubeTensor; 2],
    ) {
        let tiles = self.tiles();
        let variant = Variant { dtype: self.x.dtype, tiles, norm: norm.map(|(_, _, constants)| constants), epilogue };
        // a kernel without a norm does not read these buffers
        let (weight, of_rows) = norm.map_or((self.x, self.x), |(weight, squares, _)| (weight, squares));
        let groups = self.rows.div_ceil(tiles * SIDE);
        let buffers = [
            (self.x, ReadOnly),
            (self.w, ReadOnly),
            (weight, ReadOnly),
            (of_rows, ReadOnly),
            (base, ReadOnly),
            (out, WriteOnly),
            (squares, WriteOnly),
        ];
        let pitch = self.w.meta.strides()[0];
        let blocks = groups * self.outputs.div_ceil(OUTPUTS);
        launch_cuda(variant, [blocks, 1], &buffers, &[self.rows, self.inner, self.outputs, pitch, groups]);
    }

    /// The product in a new tensor, gated where there is an activation.
    fn computed(
        &self,
        norm: Option<(&CubeTensor, &CubeTensor, [Constant; 2])>,
        gate: Option<Activation>,
    ) -> CubeTensor {
        let (columns, epilogue) = match gate {
            Some(activation) => (self.outputs / 2, Epilogue::Gated(activation)),
            None => (self.outputs, Epilogue::Nothing),
        };
        let out = empty(self.x, [self.rows, columns], self.x.dtype);
        self.launch(norm, epilogue, self.x, [&out, &out]);
        out
    }

    fn span(&self) -> firebrick_device::trace::Span {
        span("product", 2.0 * (self.rows * self.inner * self.outputs) as f64)
    }
}

fn is_half_on_tensor_cores(like: &CubeTensor) -> bool {
    let half = matches!(like.dtype, DType::BF16 | DType::F16);
    half && compute_capability(like).is_some_and(|major| major >= 8)
}

/// True if a kernel may load 16 bytes at once from a tensor.
fn is_aligned(tensor: &CubeTensor) -> bool {
    tensor.handle.offset_start.unwrap_or(0).is_multiple_of(16)
}

/// Returns true if the outputs of gate and up, as many each, are interleaved in a matrix like this one.
pub(crate) fn is_interleaved(w: &Tensor<2>, outputs: usize) -> bool {
    outputs.is_multiple_of(EIGHT) && is_half_on_tensor_cores(&Cube::primitive(w.clone()))
}

/// See [`crate::linear_glu`].
pub(crate) fn linear_glu(x: &Tensor<2>, w: &Tensor<2>, activation: Activation) -> Tensor<2> {
    let [x, w] = [x, w].map(|t| Cube::primitive(t.clone()));
    if let Some(product) = Product::of(&x, &w) {
        let _span = product.span();
        return Cube::tensor(product.computed(None, Some(activation)));
    }
    if let Some(out) = gemm::gated_product(&x, &product::swapped(w.clone()), activation) {
        return Cube::tensor(out);
    }
    let both = product::times_transposed(&x, &w);
    glu::glu_of(&both, EIGHT, activation)
}

/// See [`crate::linear_residual`].
pub(crate) fn linear_residual(base: &Tensor<2>, x: &Tensor<2>, w: &Tensor<2>) -> Option<SquaredRows> {
    if !product::takes_plain(x, w) {
        return None;
    }
    let [base, x] = [base, x].map(|t| detached(t.clone()));
    let w = Cube::primitive(w.clone());
    let product = Product::of(&x, &w).filter(|product| product.outputs.is_multiple_of(OUTPUTS))?;
    if base.dtype != x.dtype || !is_aligned(&base) {
        return None;
    }
    let _span = product.span();
    let out = empty(&x, [product.rows, product.outputs], x.dtype);
    let squares = empty(&x, [product.rows, product.outputs / OUTPUTS], DType::F32);
    product.launch(None, Epilogue::Added, &base, [&out, &squares]);
    Some(SquaredRows { rows: Cube::tensor(out), squares: Cube::tensor(squares) })
}

/// See [`crate::rms_norm_linear`].
pub(crate) fn rms_norm_linear(
    x: &SquaredRows,
    norm: &RmsNorm,
    w: &Tensor<2>,
    gate: Option<Activation>,
) -> Option<Tensor<2>> {
    let in_turns = gate.is_none() || w.dims()[0].is_multiple_of(2 * EIGHT);
    if !in_turns || !product::takes_plain(&x.rows, w) || norm.weight.dtype() != w.dtype() {
        return None;
    }
    let [rows, squares, weight] = [&x.rows, &x.squares, &norm.weight].map(|t| detached(t.clone()));
    let w = Cube::primitive(w.clone());
    let product = Product::of(&rows, &w).filter(|_| is_aligned(&weight))?;
    let constants = [norm.eps, norm.offset].map(|number| Constant::new(number as f32));
    let _span = product.span();
    Some(Cube::tensor(product.computed(Some((&weight, &squares, constants)), gate)))
}
