//! Products of matrices in half precision on NVIDIA's tensor cores: CUDA source of our own, since none of `CubeK`'s
//! ways comes near cuBLAS, whose streams `CubeCL` could not follow ("On a GPU, beside `PyTorch`" in `BENCHMARKS.md`).
//!
//! Hopper multiplies by `wgmma`; others from Ampere on by `mma.sync`. Both read the same tiles (`gemm/tile.cuh`).

use super::column_sums::{sum_rows, sum_rows_into};
use super::cuda::{CudaSource, GATE, PTX, compute_capability, element_types, fingerprint, gate_constant, launch_cuda};
use super::prelude::*;
use cubecl::ir::attributes::BufferIOAttr;
use firebrick_spec::Activation;
use std::sync::LazyLock;

const TILE: &str = include_str!("gemm/tile.cuh");
const MMA: &str = include_str!("gemm/mma.cuh");
const WGMMA: &str = include_str!("gemm/wgmma.cuh");
const GEMM: &str = include_str!("gemm/gemm.cu");

/// Rows of the two tiles, and columns of both.
const LARGE: usize = 128;
const SMALL: usize = 64;
const TILE_COLUMNS: usize = 128;

/// Rows of tiles whose blocks are neighbours.
const GROUP: usize = 8;

/// Numbers of a copy: what rows in memory must be a multiple of.
const CHUNK: usize = 8;

/// Inputs of a tile.
const INPUTS: usize = 32;

/// Fewest inputs for which a block has sums of its own: below, adding the sums takes what the blocks save.
const MIN_INPUTS: usize = 2048;

/// Blocks of small tiles that a multiprocessor has at a time.
const BLOCKS: usize = 4;

/// Matrix instructions of the tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Instructions {
    /// A warp, out of registers: `mma.sync`, compute capability 8.0.
    Mma,
    /// Four warps, out of shared memory: `wgmma`, compute capability 9.0 alone.
    Wgmma,
}

/// The dimension of a matrix that is contiguous in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Order {
    /// The inputs that a product sums over.
    Inputs,
    /// Rows or columns of the product.
    Outputs,
}

/// A matrix as a kernel reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Operand {
    order: Order,
    /// Numbers from a row in memory to the next.
    pitch: usize,
}

impl Operand {
    /// A matrix with so many outputs and inputs, each with its stride; `None` where eight numbers that are copied might
    /// not all be the matrix's.
    fn of([outputs, inputs]: [(usize, usize); 2], matrix: &CubeTensor) -> Option<Self> {
        let (order, across, pitch) = match (outputs.1, inputs.1) {
            (pitch, 1) => (Order::Inputs, inputs.0, pitch),
            (1, pitch) => (Order::Outputs, outputs.0, pitch),
            _ => return None,
        };
        let whole = [across, pitch].iter().all(|n| n.is_multiple_of(CHUNK));
        let first = matrix.handle.offset_start.unwrap_or(0);
        let aligned = first.is_multiple_of((CHUNK * matrix.elem_size()) as u64);
        (whole && aligned && pitch >= across).then_some(Self { order, pitch })
    }
}

/// Compile-time parameters of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Variant {
    dtype: DType,
    instructions: Instructions,
    /// Rows of a tile.
    rows: usize,
    orders: [Order; 2],
    epilogue: Epilogue,
}

/// Form of a kernel's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Epilogue {
    /// Of the matrices' type.
    Rounded,
    /// In f32.
    Sums,
    /// Added to sums in f32.
    Added,
    /// The gate of an MLP, of columns that take turns by eight.
    Gated(Activation),
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        "gemm"
    }

    fn threads(&self) -> usize {
        match self.instructions {
            Instructions::Wgmma => self.rows / 64 * 128,
            Instructions::Mma => 128,
        }
    }

    fn source(&self) -> String {
        let (activation, gated) = match self.epilogue {
            Epilogue::Gated(activation) => (activation, true),
            _ => (Activation::Silu, false),
        };
        let out = if gated || self.epilogue == Epilogue::Rounded { "Element" } else { "float" };
        let adds = self.epilogue == Epilogue::Added;
        let warpgroups = u32::from(self.instructions == Instructions::Wgmma);
        // stages that fill 48 KiB, and blocks of a multiprocessor
        let (stages, blocks) = match (self.rows, self.instructions) {
            (LARGE, _) => (3, 2),
            (_, Instructions::Wgmma) => (4, BLOCKS),
            (_, Instructions::Mma) => (4, 3),
        };
        let [a, b] = self.orders.map(|order| order == Order::Inputs);
        let (rows, threads) = (self.rows, self.threads());
        let head = format!(
            "typedef {out} Out;\nstruct alignas(2 * sizeof(Out)) Pair {{ Out x, y; }};\n\
             #define WARPGROUPS {warpgroups}\n\
             static const u32 TILE_M = {rows}, TILE_N = {TILE_COLUMNS}, THREADS = {threads}, BLOCKS = {blocks};\n\
             static const int STAGES = {stages};\n\
             static const bool A_BY_INPUTS = {a}, B_BY_INPUTS = {b}, ADDS = {adds}, GATED = {gated};\n"
        );
        let sums = match self.instructions {
            Instructions::Mma => MMA,
            Instructions::Wgmma => WGMMA,
        };
        [&element_types(self.dtype), &head, PTX, &gate_constant(activation), GATE, TILE, sums, GEMM].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let instructions = [Instructions::Mma, Instructions::Wgmma];
            fingerprint(instructions.into_iter().flat_map(|instructions| {
                [SMALL, LARGE].map(|rows| {
                    let orders = [Order::Inputs; 2];
                    Variant { dtype: DType::BF16, instructions, rows, orders, epilogue: Epilogue::Rounded }.source()
                })
            }))
        });
        *SOURCES
    }
}

/// `a · b`, of one type, into a new contiguous matrix. `None` where the device, the type or the layout is not for it.
pub(super) fn product(a: &CubeTensor, b: &CubeTensor) -> Option<CubeTensor> {
    let product = Product::of(a, b)?;
    if product.parts == 1 {
        let out = empty(a, product.shape(), a.dtype);
        product.launch(Epilogue::Rounded, &out);
        return Some(out);
    }
    Some(sum_rows(product.partial_sums(), product.shape(), a.dtype))
}

/// The sums of the parts of `a · b`, `[parts, rows · columns]` in f32. `None` where the kernel does not take the
/// matrices, or one block has all inputs.
pub(super) fn parts_of_product(a: &CubeTensor, b: &CubeTensor) -> Option<CubeTensor> {
    let product = Product::of(a, b).filter(|product| product.parts > 1)?;
    Some(product.partial_sums())
}

/// The gate of an MLP, `[rows, n]`, of `a · b`, whose 2 n columns take turns by eight: first of the gate, then of what
/// it opens for. `None` where the kernel does not take the matrices, or their inputs are divided.
pub(super) fn gated_product(a: &CubeTensor, b: &CubeTensor, activation: Activation) -> Option<CubeTensor> {
    let product = Product::of(a, b).filter(|product| product.parts == 1)?;
    let [rows, columns] = product.shape();
    let out = empty(a, [rows, columns / 2], a.dtype);
    product.launch(Epilogue::Gated(activation), &out);
    Some(out)
}

/// A product of two matrices and how a kernel computes it.
pub(super) struct Product<'a> {
    inputs: [&'a CubeTensor; 2],
    instructions: Instructions,
    /// Rows of a tile.
    rows: usize,
    operands: [Operand; 2],
    /// Rows, columns, inputs.
    sizes: [usize; 3],
    /// Blocks that share the inputs of a tile, and the inputs of each.
    parts: usize,
    part: usize,
}

impl<'a> Product<'a> {
    /// `a · b`. `None` where the device, the type or the layout is not for it.
    pub(super) fn of(a: &'a CubeTensor, b: &'a CubeTensor) -> Option<Self> {
        let ([m, k], [_, n]) = (dims(a), dims(b));
        if !matches!(a.dtype, DType::BF16 | DType::F16) || n % 2 != 0 {
            return None;
        }
        let instructions = instructions(a)?;
        let [rows, columns] = [a, b].map(|t| (t.meta.strides()[0], t.meta.strides()[1]));
        let left = Operand::of([(m, rows.0), (k, rows.1)], a)?;
        let right = Operand::of([(n, columns.1), (k, columns.0)], b)?;
        let by_inputs = [left, right].iter().all(|operand| operand.order == Order::Inputs);

        let multiprocessors = a.client.properties().hardware.num_streaming_multiprocessors;
        let at_once = multiprocessors.unwrap_or(32) as usize * BLOCKS;
        let tiles = |rows: usize| m.div_ceil(rows) * n.div_ceil(TILE_COLUMNS);
        // large tiles read less of both matrices; wgmma loses more by fewer blocks where one of them lies by outputs
        let large = tiles(LARGE) >= at_once && (by_inputs || instructions == Instructions::Mma);
        let parts = (at_once / tiles(SMALL)).min(k / MIN_INPUTS).max(1);
        let part = k.div_ceil(parts).next_multiple_of(INPUTS);
        Some(Self {
            inputs: [a, b],
            instructions,
            rows: if large { LARGE } else { SMALL },
            operands: [left, right],
            sizes: [m, n, k],
            parts: k.div_ceil(part),
            part,
        })
    }

    fn shape(&self) -> [usize; 2] {
        [self.sizes[0], self.sizes[1]]
    }

    /// The product added to a contiguous matrix in f32, or in f32 where there is none. The product is summed first: so
    /// it does not matter whether it is added here or later.
    pub(super) fn added_to(&self, sum: Option<CubeTensor>) -> CubeTensor {
        let (epilogue, add) = if sum.is_some() { (Epilogue::Added, true) } else { (Epilogue::Sums, false) };
        let out = sum.unwrap_or_else(|| empty(self.inputs[0], self.shape(), DType::F32));
        if self.parts == 1 {
            self.launch(epilogue, &out);
        } else {
            sum_rows_into(self.partial_sums(), &out, add);
        }
        out
    }

    /// Sums of each part of the inputs.
    fn partial_sums(&self) -> CubeTensor {
        let [m, n] = self.shape();
        let sums = empty(self.inputs[0], [self.parts, m * n], DType::F32);
        self.launch(Epilogue::Sums, &sums);
        sums
    }

    fn launch(&self, epilogue: Epilogue, out: &CubeTensor) {
        let Self { inputs: [a, b], rows, operands: [left, right], sizes: [m, n, k], .. } = *self;
        let orders = [left.order, right.order];
        let variant = Variant { dtype: a.dtype, instructions: self.instructions, rows, orders, epilogue };
        let tiles = m.div_ceil(rows) * n.div_ceil(TILE_COLUMNS);
        let to = if epilogue == Epilogue::Added { BufferIOAttr::ReadWrite } else { BufferIOAttr::WriteOnly };
        let buffers = [(a, BufferIOAttr::ReadOnly), (b, BufferIOAttr::ReadOnly), (out, to)];
        launch_cuda(variant, [tiles, self.parts], &buffers, &[m, n, k, left.pitch, right.pitch, self.part, GROUP]);
    }
}

/// Matrix instructions of a device; `None` if it is none of NVIDIA's, or older than Ampere.
fn instructions(like: &CubeTensor) -> Option<Instructions> {
    match compute_capability(like)? {
        9 => Some(Instructions::Wgmma),
        8.. => Some(Instructions::Mma),
        _ => None,
    }
}
