//! Products of matrices in half precision on NVIDIA's tensor cores: CUDA source of ours, since no way of `CubeK` comes
//! near cuBLAS ("Rates of a GPU" in `BENCHMARKS.md`), or cuBLASLt within [`with_cublaslt`](crate::with_cublaslt()).
//!
//! Hopper multiplies by `wgmma`; others from Ampere on by `mma.sync`. Both read the same tiles (`gemm/tile.cuh`).

use super::column_sums::{sum_rows_into, sum_rows_plus};
#[cfg(feature = "cuda")]
use super::cublaslt;
use super::cuda::{CudaSource, GATE, PTX, compute_capability, element_types, fingerprint, gate_constant, launch_cuda};
use super::prelude::*;
use crate::cublaslt::multiplies;
use crate::exact::is_exact;
use cubecl::ir::attributes::BufferIOAttr;
use firebrick_spec::Activation;
use std::sync::LazyLock;

const TILE: &str = include_str!("gemm/tile.cuh");
const MMA: &str = include_str!("gemm/mma.cuh");
const WGMMA: &str = include_str!("gemm/wgmma.cuh");
const GEMM: &str = include_str!("gemm/gemm.cu");

/// Rows and columns of a tile.
type Tile = [usize; 2];
const LARGE: Tile = [128, 128];
const SMALL: Tile = [64, 128];
const NARROW: Tile = [64, 64];

/// Rows of tiles whose blocks are neighbours.
const GROUP: usize = 8;

/// Numbers of a copy: what rows in memory must be a multiple of.
pub(super) const CHUNK: usize = 8;

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
    tile: Tile,
    orders: [Order; 2],
    /// Pairs of matrices.
    pairs: usize,
    /// True if all products are summed.
    summed: bool,
    epilogue: Epilogue,
}

/// Form of a kernel's sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Epilogue {
    /// Of the matrices' type.
    Rounded,
    /// Of the matrices' type, with a matrix of it added before.
    Plus,
    /// In f32.
    Sums,
    /// Added to sums in f32.
    Added,
    /// The gate of an MLP, of columns interleaved by eight.
    Gated(Activation),
}

impl Variant {
    /// Products that the kernel writes.
    fn products(&self) -> usize {
        if self.summed { 1 } else { self.pairs }
    }

    /// Parameters of the kernel, by the letter of their names, and how many there are of each.
    fn buffers(&self) -> [(&'static str, &'static str, usize); 4] {
        let plus = if self.epilogue == Epilogue::Plus { self.products() } else { 0 };
        let out = ("Out*", "out", self.products());
        [
            ("Element const*", "a", self.pairs),
            ("Element const*", "b", self.pairs),
            ("Element const*", "plus", plus),
            out,
        ]
    }
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        "gemm"
    }

    fn threads(&self) -> usize {
        match self.instructions {
            Instructions::Wgmma => self.tile[0] / 64 * 128,
            Instructions::Mma => 128,
        }
    }

    fn source(&self) -> String {
        let (activation, gated) = match self.epilogue {
            Epilogue::Gated(activation) => (activation, true),
            _ => (Activation::Silu, false),
        };
        let out = match self.epilogue {
            Epilogue::Rounded | Epilogue::Plus | Epilogue::Gated(_) => "Element",
            Epilogue::Sums | Epilogue::Added => "float",
        };
        let adds = self.epilogue == Epilogue::Added;
        let warpgroups = u32::from(self.instructions == Instructions::Wgmma);
        // stages that fill 48 KiB, and blocks of a multiprocessor
        let (stages, blocks) = match (self.tile, self.instructions) {
            (LARGE, _) => (3, 2),
            (NARROW, _) => (6, BLOCKS),
            (_, Instructions::Wgmma) => (4, BLOCKS),
            (_, Instructions::Mma) => (4, 3),
        };
        let [a, b] = self.orders.map(|order| order == Order::Inputs);
        let Self { tile: [rows, columns], pairs, summed, .. } = *self;
        let threads = self.threads();
        let buffers = self.buffers();
        let parameters = buffers
            .iter()
            .flat_map(|&(kind, name, count)| (0..count).map(move |index| format!("{kind} __restrict__ {name}{index}")));
        let parameters: Vec<String> = parameters.collect();
        // places in the buffers of a pair
        let places = buffers.iter().zip(["LEFT", "RIGHT", "PLUS_AT", "OUT"]).filter(|((.., count), _)| *count > 0);
        let places = places.map(|(&(_, name, count), of)| {
            let others = (1..count).rev().map(|index| format!("pair == {index} ? &{name}{index}[at] : "));
            format!("#define {of}(pair, at) ({}&{name}0[at])\n", others.collect::<Vec<_>>().concat())
        });
        let places = places.collect::<Vec<_>>().concat();
        let head = format!(
            "typedef {out} Out;\nstruct alignas(2 * sizeof(Out)) Pair {{ Out x, y; }};\n\
             struct alignas(2 * sizeof(Element)) Elements {{ Element x, y; }};\n\
             #define WARPGROUPS {warpgroups}\n#define BUFFER_COUNT {}\n{places}\
             static const u32 TILE_M = {rows}, TILE_N = {columns}, THREADS = {threads}, BLOCKS = {blocks}, PAIRS = {pairs};\n\
             static const int STAGES = {stages};\n\
             static const bool A_BY_INPUTS = {a}, B_BY_INPUTS = {b}, SUMMED = {summed}, ADDS = {adds}, GATED = {gated};\n",
            parameters.len()
        );
        let sums = match self.instructions {
            Instructions::Mma => MMA,
            Instructions::Wgmma => WGMMA,
        };
        let kernel = GEMM.replace("gemm(BUFFERS,", &format!("gemm({},", parameters.join(", ")));
        [&element_types(self.dtype), &head, PTX, &gate_constant(activation), GATE, TILE, sums, &kernel].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let instructions = [Instructions::Mma, Instructions::Wgmma];
            fingerprint(instructions.into_iter().flat_map(|instructions| {
                [NARROW, SMALL, LARGE].map(|tile| {
                    let (dtype, orders, epilogue) = (DType::BF16, [Order::Inputs; 2], Epilogue::Plus);
                    Variant { dtype, instructions, tile, orders, pairs: 1, summed: false, epilogue }.source()
                })
            }))
        });
        *SOURCES
    }
}

/// `a · b`, of one type, into a new contiguous matrix. `None` where the device, the type or the layout is not for it.
pub(super) fn product(a: &CubeTensor, b: &CubeTensor) -> Option<CubeTensor> {
    Some(Products::each(&[[a, b]])?.rounded().remove(0))
}

/// The sums of the parts of `a · b`, `[parts, rows · columns]` in f32. `None` where the kernel does not take the
/// matrices, or one block has all inputs.
pub(super) fn parts_of_product(a: &CubeTensor, b: &CubeTensor) -> Option<CubeTensor> {
    let products = Products::each(&[[a, b]]).filter(|products| products.parts > 1)?;
    Some(products.partial_sums().remove(0))
}

/// The gate of an MLP, `[rows, n]`, of `a · b`, whose 2 n columns are interleaved by eight: first of the gate, then of what
/// it opens for. `None` where the kernel does not take the matrices, or their inputs are divided.
pub(super) fn gated_product(a: &CubeTensor, b: &CubeTensor, activation: Activation) -> Option<CubeTensor> {
    let products = Products::each(&[[a, b]]).filter(|products| products.parts == 1 && !products.by_library)?;
    let [rows, columns] = products.pairs[0].shape();
    let out = empty(a, [rows, columns / 2], a.dtype);
    products.launch(Epilogue::Gated(activation), &[], std::slice::from_ref(&out));
    Some(out)
}

/// Products of pairs of matrices of one type, and how a kernel computes them.
pub(super) struct Products<'a> {
    pairs: Vec<Pair<'a>>,
    /// True if all products are summed.
    summed: bool,
    instructions: Instructions,
    tile: Tile,
    /// Blocks that share the inputs of a tile, and the tiles of inputs of each.
    parts: usize,
    part: usize,
    /// True if cuBLASLt multiplies.
    by_library: bool,
}

/// Two matrices of a product.
#[derive(Clone, Debug)]
struct Pair<'a> {
    matrices: [&'a CubeTensor; 2],
    operands: [Operand; 2],
    /// Rows, columns, inputs.
    sizes: [usize; 3],
}

impl<'a> Pair<'a> {
    fn of([a, b]: [&'a CubeTensor; 2]) -> Option<Self> {
        let ([m, k], [_, n]) = (dims(a), dims(b));
        let [rows, columns] = [a, b].map(|t| (t.meta.strides()[0], t.meta.strides()[1]));
        let left = Operand::of([(m, rows.0), (k, rows.1)], a)?;
        let right = Operand::of([(n, columns.1), (k, columns.0)], b)?;
        n.is_multiple_of(2).then_some(Self { matrices: [a, b], operands: [left, right], sizes: [m, n, k] })
    }

    fn orders(&self) -> [Order; 2] {
        self.operands.map(|operand| operand.order)
    }

    fn shape(&self) -> [usize; 2] {
        [self.sizes[0], self.sizes[1]]
    }

    /// Tiles of the product.
    fn tiles(&self, [rows, columns]: Tile) -> usize {
        self.sizes[0].div_ceil(rows) * self.sizes[1].div_ceil(columns)
    }
}

impl<'a> Products<'a> {
    /// The product of each pair, of as many inputs. `None` where the device, the type or the layout is not for it.
    pub(super) fn each(pairs: &[[&'a CubeTensor; 2]]) -> Option<Self> {
        Self::of(pairs, false)
    }

    /// The sum of the products of all pairs. `None` where the device, the type or the layout is not for it.
    pub(super) fn sum(pairs: &[[&'a CubeTensor; 2]]) -> Option<Self> {
        Self::of(pairs, true)
    }

    fn of(pairs: &[[&'a CubeTensor; 2]], summed: bool) -> Option<Self> {
        let like = pairs[0][0];
        let instructions = instructions(like).filter(|_| takes(like))?;
        let pairs: Vec<Pair<'_>> = pairs.iter().map(|&pair| Pair::of(pair)).collect::<Option<_>>()?;
        let first = &pairs[0];
        let fits = |pair: &Pair<'_>| {
            let sizes = if summed { pair.shape() == first.shape() } else { pair.sizes[2] == first.sizes[2] };
            sizes && pair.orders() == first.orders()
        };
        if !pairs.iter().all(fits) {
            return None;
        }
        let by_inputs = first.orders() == [Order::Inputs; 2];
        let products = if summed { &pairs[..1] } else { &pairs[..] };
        let tiles = |tile: Tile| products.iter().map(|pair| pair.tiles(tile)).sum::<usize>();
        let summed_over = if summed { &pairs[..] } else { &pairs[..1] };
        let inputs = |unit: usize| summed_over.iter().map(|pair| pair.sizes[2].div_ceil(unit)).sum::<usize>();

        let by_library = multiplies(pairs.iter().map(|pair| 2 * pair.sizes.iter().product::<usize>()).sum());
        let multiprocessors = like.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(32) as usize;
        let at_once = multiprocessors * BLOCKS;
        // large tiles read less of both matrices; wgmma loses more by fewer blocks where one of them lies by outputs
        let large = tiles(LARGE) >= at_once && (by_inputs || instructions == Instructions::Mma);
        // how many parts there are depends on the number of rows
        let whole = is_exact() || by_library;
        let parts = if whole { 1 } else { (at_once / tiles(SMALL)).min(inputs(1) / MIN_INPUTS).max(1) };
        let part = inputs(INPUTS).div_ceil(parts);
        let parts = inputs(INPUTS).div_ceil(part);
        // narrow tiles give more multiprocessors a block; exact passes use one instruction for any number of rows
        let narrow = !is_exact() && tiles(SMALL) * parts < multiprocessors;
        let tile = match (large, narrow) {
            (true, _) => LARGE,
            (_, true) => NARROW,
            _ => SMALL,
        };
        Some(Self { pairs, summed, instructions, tile, parts, part, by_library })
    }

    /// Shapes of the products.
    fn shapes(&self) -> impl Iterator<Item = [usize; 2]> + '_ {
        let products = if self.summed { 1 } else { self.pairs.len() };
        self.pairs[..products].iter().map(Pair::shape)
    }

    fn like(&self) -> &'a CubeTensor {
        self.pairs[0].matrices[0]
    }

    /// New contiguous matrices.
    pub(super) fn rounded(&self) -> Vec<CubeTensor> {
        self.rounded_plus(&[])
    }

    /// [`Self::rounded`], with a contiguous matrix or one row of the products' type added to each before it is rounded,
    /// if there are any.
    pub(super) fn rounded_plus(&self, plus: &[&CubeTensor]) -> Vec<CubeTensor> {
        let like = self.like();
        let out: Vec<CubeTensor> = self.shapes().map(|shape| empty(like, shape, like.dtype)).collect();
        // the library rounds every product that it sums
        if self.parts == 1 && !(self.by_library && self.pairs.len() > out.len()) {
            let epilogue = if plus.is_empty() { Epilogue::Rounded } else { Epilogue::Plus };
            self.launch(epilogue, plus, &out);
            return out;
        }
        for (index, (partial, out)) in self.partial_sums().into_iter().zip(&out).enumerate() {
            match plus.get(index) {
                Some(plus) => sum_rows_plus(partial, plus, out),
                None => sum_rows_into(partial, out, false),
            }
        }
        out
    }

    /// The products added to contiguous matrices in f32, or in f32 where there are none. A product is summed first: so
    /// it does not matter whether it is added here or later.
    pub(super) fn added_to(&self, sums: Vec<Option<CubeTensor>>) -> Vec<CubeTensor> {
        let adds = sums[0].is_some();
        if sums.iter().any(|sum| sum.is_some() != adds) {
            let one = |(pair, sum): (&Pair<'a>, _)| {
                let product = Self::each(&[pair.matrices]).unwrap_or_else(|| unreachable!("several are multiplied"));
                product.added_to(vec![sum])
            };
            return self.pairs.iter().zip(sums).flat_map(one).collect();
        }
        let new = |(sum, shape): (Option<CubeTensor>, _)| sum.unwrap_or_else(|| empty(self.like(), shape, DType::F32));
        let out: Vec<CubeTensor> = sums.into_iter().zip(self.shapes()).map(new).collect();
        if self.parts == 1 {
            self.launch(if adds { Epilogue::Added } else { Epilogue::Sums }, &[], &out);
        } else {
            let partial = self.partial_sums();
            partial.into_iter().zip(&out).for_each(|(partial, out)| sum_rows_into(partial, out, adds));
        }
        out
    }

    /// Sums of each part of the inputs.
    fn partial_sums(&self) -> Vec<CubeTensor> {
        let new = |[m, n]: [usize; 2]| empty(self.like(), [self.parts, m * n], DType::F32);
        let sums: Vec<CubeTensor> = self.shapes().map(new).collect();
        self.launch(Epilogue::Sums, &[], &sums);
        sums
    }

    fn launch(&self, epilogue: Epilogue, plus: &[&CubeTensor], out: &[CubeTensor]) {
        if self.by_library && self.launch_library(epilogue, plus, out) {
            return;
        }
        let Self { pairs, summed, instructions, tile, .. } = self;
        let variant = Variant {
            dtype: self.like().dtype,
            instructions: *instructions,
            tile: *tile,
            orders: pairs[0].orders(),
            pairs: pairs.len(),
            summed: *summed,
            epilogue,
        };
        let to = if epilogue == Epilogue::Added { BufferIOAttr::ReadWrite } else { BufferIOAttr::WriteOnly };
        let side = |side: usize| pairs.iter().map(move |pair| pair.matrices[side]);
        let read = side(0).chain(side(1)).chain(plus.iter().copied()).map(|t| (t, BufferIOAttr::ReadOnly));
        let buffers: Vec<_> = read.chain(out.iter().map(|t| (t, to))).collect();
        let sizes = pairs.iter().enumerate().flat_map(|(index, pair)| {
            let ([m, n, k], [left, right]) = (pair.sizes, pair.operands);
            // one row is added to every row
            let plus_pitch = plus.get(index).filter(|plus| dims::<2>(plus)[0] == m).map_or(0, |_| n);
            [m, n, k, left.pitch, right.pitch, plus_pitch]
        });
        let sizes: Vec<usize> = sizes.chain([self.part, GROUP]).collect();
        let products = if *summed { &pairs[..1] } else { &pairs[..] };
        let tiles = products.iter().map(|pair| pair.tiles(*tile)).sum();
        launch_cuda(variant, [tiles, self.parts], &buffers, &sizes);
    }
}

/// Products by cuBLASLt.
#[cfg(feature = "cuda")]
impl<'a> Products<'a> {
    /// False if it has no kernel, or a buffer was not computed, which a launch of our kernel reports where results are read.
    fn launch_library(&self, epilogue: Epilogue, plus: &[&CubeTensor], out: &[CubeTensor]) -> bool {
        let product = |(index, pair)| {
            let pair: &Pair<'a> = pair;
            let [a, b] = [0, 1].map(|side| {
                let Operand { order, pitch } = pair.operands[side];
                // column-major, the right operand has outputs as rows, and the left one has inputs
                let transposed = (order == Order::Inputs) == (side == 1);
                cublaslt::Operand { matrix: pair.matrices[side], transposed, pitch }
            });
            let out = if self.summed { &out[0] } else { &out[index] };
            let adds = epilogue == Epilogue::Added || (self.summed && index > 0);
            cublaslt::Matmul { a, b, sizes: pair.sizes, plus: plus.get(index).copied(), adds, out }
        };
        let products: Vec<_> = self.pairs.iter().enumerate().map(product).collect();
        match cublaslt::multiply(&products) {
            Ok(()) => true,
            Err(cublaslt::Refused::Buffer | cublaslt::Refused::Shape) => false,
            Err(cublaslt::Refused::Failed(why)) => {
                let [m, n, k] = self.pairs[0].sizes;
                panic!("cuBLASLt does not multiply {m} × {k} × {n}: {why}; set `matmul: firebrick`")
            }
        }
    }
}

/// This build has no CUDA.
#[cfg(not(feature = "cuda"))]
impl Products<'_> {
    fn launch_library(&self, _epilogue: Epilogue, _plus: &[&CubeTensor], _out: &[CubeTensor]) -> bool {
        false
    }
}

/// Returns true if the kernel multiplies matrices of this one's device and type.
pub(super) fn takes(like: &CubeTensor) -> bool {
    matches!(like.dtype, DType::BF16 | DType::F16) && instructions(like).is_some()
}

/// Matrix instructions of a device; `None` if it is none of NVIDIA's, or older than Ampere.
fn instructions(like: &CubeTensor) -> Option<Instructions> {
    match compute_capability(like)? {
        9 => Some(Instructions::Wgmma),
        8.. => Some(Instructions::Mma),
        _ => None,
    }
}
