//! On NVIDIA's tensor cores from Ampere on, for heads of 64, 96 and 128 in half precision: CUDA C++ with scores in
//! registers and asynchronous copies (FlashAttention-2; Dao, 2023).

use super::blocks::Layout;
use crate::cube::column_sums::sum_rows_into;
use crate::cube::cuda::{
    Constant, CudaSource, HEADS, PTX, compute_capability, element_types, fingerprint, launch_cuda,
};
use crate::cube::prelude::*;
use crate::prefix_groups::{BlockRows, BlockTable, Blocks};
use cubecl::ir::attributes::BufferIOAttr::{ReadOnly, WriteOnly};
use firebrick_metadata::paged::TILE_BLOCKS;
use firebrick_spec::BLOCK_SIZE;
use std::sync::LazyLock;

/// Rows of heads in shared memory and products of them, for a `DIM`, `ROWS`, `WARP_ROWS` and `OTHERS`, and for [`HEADS`].
pub(in crate::cube) const TILE: &str = include_str!("flash/tile.cuh");
const BLOCKS: &str = include_str!("flash/blocks.cuh");
const FORWARD: &str = include_str!("flash/forward.cu");
const QUERY_GRADIENT: &str = include_str!("flash/query_gradient.cu");
const KEY_VALUE_GRADIENTS: &str = include_str!("flash/key_value_gradients.cu");
const DELTA: &str = include_str!("flash/delta.cu");

/// Rows of heads of a block of [`Pass::Delta`].
const DELTA_ROWS: usize = 16;

/// Blocks for each multiprocessor below which the query heads of a group are divided among several blocks of keys.
const KEY_BLOCKS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    QueryGradient,
    KeyValueGradients,
    Delta,
}

/// Rows of a block of threads.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    block: BlockRows,
    /// Rows of a warp.
    warp: usize,
    /// Rows of the other side in a tile.
    others: usize,
    /// Blocks that a multiprocessor has at a time.
    blocks: usize,
}

/// Compile-time parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    pass: Pass,
    dtype: DType,
    dim: usize,
    scale: Constant,
    /// The soft-cap.
    cap: Option<Constant>,
    sinks: bool,
    /// True if gradients of keys and values stay in f32, to be summed over the parts of a group.
    partial: bool,
}

/// Keys that the forward pass adds to a row's sums at a time, from a sequence's first on.
pub(in crate::cube) const fn keys_of_tile(dim: usize) -> usize {
    if dim == 64 { 64 } else { 32 }
}
const _: () = assert!(TILE_BLOCKS * BLOCK_SIZE % keys_of_tile(64) == 0, "block tables begin at a multiple of a tile");

impl Variant {
    /// The fastest of some tilings measured on an H200 within 48 KiB of shared memory.
    fn tiling(&self) -> Tiling {
        let (block, warp, others, blocks) = match (self.pass, self.dim) {
            (Pass::Forward | Pass::Delta, dim) => (BlockRows::Of64, 16, keys_of_tile(dim), 3),
            (_, 64) => (BlockRows::Of128, 32, 32, 2),
            (_, 96) => (BlockRows::Of64, 16, 32, 2),
            _ => (BlockRows::Of64, 16, 16, 3),
        };
        Tiling { block, warp, others, blocks }
    }

    fn of(pass: Pass, params: &Params, like: &CubeTensor) -> Self {
        let cap = params.capped.then(|| Constant::new(params.layout.cap));
        let [.., dim] = dims::<3>(like);
        Self {
            pass,
            dtype: like.dtype,
            dim,
            scale: Constant::new(params.layout.scale),
            cap,
            sinks: false,
            partial: false,
        }
    }
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        match self.pass {
            Pass::Forward => "flash_forward",
            Pass::QueryGradient => "flash_query_gradient",
            Pass::KeyValueGradients => "flash_key_value_gradients",
            Pass::Delta => "flash_delta",
        }
    }

    fn threads(&self) -> usize {
        let Tiling { block, warp, .. } = self.tiling();
        if self.pass == Pass::Delta { 16 * DELTA_ROWS } else { block.count() / warp * 32 }
    }

    fn source(&self) -> String {
        let (buffers, text) = match self.pass {
            Pass::Forward => (7, FORWARD),
            Pass::QueryGradient => (7, QUERY_GRADIENT),
            Pass::KeyValueGradients => (8, KEY_VALUE_GRADIENTS),
            Pass::Delta => (4, DELTA),
        };
        let Tiling { block, warp, others, blocks } = self.tiling();
        let (dim, rows, scale, cap) = (self.dim, block.count(), self.scale, self.cap.unwrap_or(Constant::new(1.0)));
        let out = if self.partial { "float" } else { "Element" };
        let (capped, sinks) = (self.cap.is_some(), self.sinks);
        let head = format!(
            "#define WARPGROUPS 0\ntypedef {out} Out;\n\
             static const u32 BUFFERS = {buffers}, DIM = {dim}, ROWS = {rows}, WARP_ROWS = {warp}, OTHERS = {others}, BLOCKS = {blocks};\n\
             static const bool CAPPED = {capped}, SINKS = {sinks};\n\
             static const float SCALE = {scale}, CAP = {cap};\n"
        );
        [&element_types(self.dtype), &head, PTX, HEADS, TILE, BLOCKS, text].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let passes = [Pass::Forward, Pass::QueryGradient, Pass::KeyValueGradients, Pass::Delta];
            let of = |pass| {
                [64, 96, 128].map(|dim| {
                    let (dtype, scale, cap) = (DType::BF16, Constant::new(1.0), None);
                    Variant { pass, dtype, dim, scale, cap, sinks: false, partial: false }.source()
                })
            };
            fingerprint(passes.into_iter().flat_map(of))
        });
        *SOURCES
    }
}

/// The arguments that all launches share.
pub(super) struct Params<'a> {
    pub blocks: &'a Blocks,
    pub layout: Layout,
    pub capped: bool,
    /// True if every row is in a sequence.
    pub whole: bool,
}

impl Params<'_> {
    /// Sizes of a launch on the blocks of a table from an offset on, with some parts of a group, for tensors of `rows`.
    fn sizes(&self, table: &BlockTable, first: usize, parts: usize, rows: usize) -> [usize; 7] {
        let Layout { heads, group, window, .. } = self.layout;
        [first, table.spans(), heads, group, window as usize, parts, rows]
    }
}

/// Returns true if the kernels take heads of some elements on a tensor's device and in its type.
pub(in crate::cube) fn takes_heads(like: &CubeTensor, dim: usize) -> bool {
    let half = matches!(like.dtype, DType::BF16 | DType::F16);
    half && matches!(dim, 64 | 96 | 128) && compute_capability(like).is_some_and(|major| major >= 8)
}

/// Returns true if the kernels take a tensor.
pub(super) fn takes(q: &CubeTensor) -> bool {
    let [.., dim] = dims::<3>(q);
    takes_heads(q, dim)
}

/// Writes the output and each row's logsumexp, with sinks (f32, one for each head) if there are any.
pub(super) fn forward(
    params: &Params<'_>,
    [q, k, v]: [&CubeTensor; 3],
    sinks: Option<&CubeTensor>,
    out: &CubeTensor,
    lse: &CubeTensor,
) {
    let variant = Variant { sinks: sinks.is_some(), ..Variant::of(Pass::Forward, params, q) };
    let table = params.blocks.table(variant.tiling().block);
    let entries = integers(&table.entries);
    let buffers = [
        (q, ReadOnly),
        (k, ReadOnly),
        (v, ReadOnly),
        // kernels without sinks do not read this buffer
        (sinks.unwrap_or(q), ReadOnly),
        (out, WriteOnly),
        (lse, WriteOnly),
        (&entries, ReadOnly),
    ];
    let sizes = params.sizes(table, 0, 1, dims::<3>(q)[0]);
    launch_cuda(variant, [table.count * params.layout.heads, 1], &buffers, &sizes);
}

/// The logsumexp and Δ = Σ O ∘ dO of each row and head, `[rows, heads, 2]`.
pub(super) fn delta(params: &Params<'_>, [out, gradient, lse, numbers]: [&CubeTensor; 4]) {
    let variant = Variant::of(Pass::Delta, params, out);
    let [rows, heads, _] = dims::<3>(out);
    let mut sizes = [0; 7];
    sizes[6] = rows * heads;
    let buffers = [(out, ReadOnly), (gradient, ReadOnly), (lse, ReadOnly), (numbers, WriteOnly)];
    launch_cuda(variant, [(rows * heads).div_ceil(DELTA_ROWS), 1], &buffers, &sizes);
}

/// Writes the gradient of queries, given each row's logsumexp and Δ.
pub(super) fn query_gradient(params: &Params<'_>, [q, k, v, gradient, numbers]: [&CubeTensor; 5], d_q: &CubeTensor) {
    let variant = Variant::of(Pass::QueryGradient, params, q);
    let table = params.blocks.table(variant.tiling().block);
    let entries = integers(&table.entries);
    let inputs = [q, k, v, gradient, numbers].map(|t| (t, ReadOnly));
    let buffers = [&inputs[..], &[(d_q, WriteOnly), (&entries, ReadOnly)]].concat();
    let sizes = params.sizes(table, 0, 1, dims::<3>(q)[0]);
    launch_cuda(variant, [table.count * params.layout.heads, 1], &buffers, &sizes);
}

/// The gradients of keys and values, given each row's logsumexp and Δ.
///
/// Where few blocks of keys would leave the GPU idle, each has a part of its group's query heads alone, and sums in
/// f32; the sums of all parts are added in their order.
pub(super) fn key_value_gradients(
    params: &Params<'_>,
    [q, k, v, gradient, numbers]: [&CubeTensor; 5],
) -> [CubeTensor; 2] {
    let variant = Variant::of(Pass::KeyValueGradients, params, q);
    let [rows, kv_heads, dim] = dims::<3>(k);
    let group = params.layout.group;
    let multiprocessors = q.client.properties().hardware.num_streaming_multiprocessors.unwrap_or(32) as usize;
    let table = params.blocks.table(variant.tiling().block);
    let entries = integers(&table.entries);
    let blocks = table.count * kv_heads;
    let parts = (KEY_BLOCKS * multiprocessors).div_ceil(blocks.max(1)).clamp(1, group);
    let partial = parts > 1;
    let (shape, n) = ([rows, kv_heads, dim], rows * kv_heads * dim);
    let sums = partial.then(|| empty_or_zeros(k, [2 * parts, n], DType::F32, params.whole));
    let [d_k, d_v] = match &sums {
        Some(sums) => [0, 1].map(|half| slice_of(sums, half * parts * n..(half + 1) * parts * n, [parts, n])),
        None => [(); 2].map(|()| empty_or_zeros(k, shape, k.dtype, params.whole)),
    };
    let inputs = [q, k, v, gradient, numbers].map(|t| (t, ReadOnly));
    let buffers = [&inputs[..], &[(&d_k, WriteOnly), (&d_v, WriteOnly), (&entries, ReadOnly)]].concat();
    let sizes = params.sizes(table, table.keys(), parts, rows);
    launch_cuda(Variant { partial, ..variant }, [blocks * parts, 1], &buffers, &sizes);
    let Some(sums) = sums else {
        return [d_k, d_v];
    };
    let both = empty(k, [2, n], k.dtype);
    sum_rows_into(sums, &both, false);
    [0, 1].map(|half| slice_of(&both, half * n..(half + 1) * n, shape))
}
