//! Products of matrices in half precision on NVIDIA's tensor cores: CUDA source of our own, since none of `CubeK`'s
//! ways comes near cuBLAS, whose streams `CubeCL` could not follow ("On a GPU, beside `PyTorch`" in `BENCHMARKS.md`).
//!
//! Hopper multiplies by `wgmma`; others from Ampere on by `mma.sync`. Both read the same tiles (`gemm/tile.cuh`).

use super::column_sums::sum_rows;
use super::cuda::{CudaSource, PTX, compute_capability, element_types, fingerprint, launch_cuda};
use super::prelude::*;
use cubecl::ir::attributes::BufferIOAttr;
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
    /// True if sums stay in f32, for those of other inputs to be added.
    parts: bool,
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
        let out = if self.parts { "float" } else { "Element" };
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
             static const bool A_BY_INPUTS = {a}, B_BY_INPUTS = {b};\n"
        );
        let sums = match self.instructions {
            Instructions::Mma => MMA,
            Instructions::Wgmma => WGMMA,
        };
        [&element_types(self.dtype), &head, PTX, TILE, sums, GEMM].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let instructions = [Instructions::Mma, Instructions::Wgmma];
            fingerprint(instructions.into_iter().flat_map(|instructions| {
                [SMALL, LARGE].map(|rows| {
                    let orders = [Order::Inputs; 2];
                    Variant { dtype: DType::BF16, instructions, rows, orders, parts: false }.source()
                })
            }))
        });
        *SOURCES
    }
}

/// `a · b`, of one type, into a new contiguous matrix. `None` where the device, the type or the layout is not for it.
pub(super) fn product(a: &CubeTensor, b: &CubeTensor) -> Option<CubeTensor> {
    let ([m, k], [_, n]) = (dims(a), dims(b));
    if !matches!(a.dtype, DType::BF16 | DType::F16) || n % 2 != 0 {
        return None;
    }
    let instructions = instructions(a)?;
    let [rows, columns] = [a, b].map(|t| (t.meta.strides()[0], t.meta.strides()[1]));
    let left = Operand::of([(m, rows.0), (k, rows.1)], a)?;
    let right = Operand::of([(n, columns.1), (k, columns.0)], b)?;
    let orders = [left.order, right.order];

    let multiprocessors = a.client.properties().hardware.num_streaming_multiprocessors;
    let at_once = multiprocessors.unwrap_or(32) as usize * BLOCKS;
    let tiles = |rows: usize| m.div_ceil(rows) * n.div_ceil(TILE_COLUMNS);
    // large tiles read less of both matrices; wgmma loses more by fewer blocks where one of them lies by outputs
    let large = tiles(LARGE) >= at_once && (orders == [Order::Inputs; 2] || instructions == Instructions::Mma);
    let parts = (at_once / tiles(SMALL)).min(k / MIN_INPUTS).max(1);
    let part = k.div_ceil(parts).next_multiple_of(INPUTS);
    let parts = k.div_ceil(part);
    let variant =
        Variant { dtype: a.dtype, instructions, rows: if large { LARGE } else { SMALL }, orders, parts: parts > 1 };
    let sizes = [m, n, k, left.pitch, right.pitch, part];
    if parts == 1 {
        let out = empty(a, [m, n], a.dtype);
        launch(variant, [a, b], &out, sizes, 1);
        return Some(out);
    }
    let sums = empty(a, [parts, m * n], DType::F32);
    launch(variant, [a, b], &sums, sizes, parts);
    Some(sum_rows(sums, [m, n], a.dtype))
}

/// `sizes`: rows, columns, inputs, pitches of both matrices, inputs of a part.
fn launch(variant: Variant, inputs: [&CubeTensor; 2], out: &CubeTensor, sizes: [usize; 6], parts: usize) {
    let [m, n, ..] = sizes;
    let tiles = m.div_ceil(variant.rows) * n.div_ceil(TILE_COLUMNS);
    let buffers =
        [(inputs[0], BufferIOAttr::ReadOnly), (inputs[1], BufferIOAttr::ReadOnly), (out, BufferIOAttr::WriteOnly)];
    launch_cuda(variant, [tiles, parts], &buffers, &[&sizes[..], &[GROUP]].concat());
}

/// Matrix instructions of a device; `None` if it is none of NVIDIA's, or older than Ampere.
fn instructions(like: &CubeTensor) -> Option<Instructions> {
    match compute_capability(like)? {
        9 => Some(Instructions::Wgmma),
        8.. => Some(Instructions::Mma),
        _ => None,
    }
}
