//! Decode attention on NVIDIA's tensor cores from Ampere on, in half precision: CUDA C++ with 16-byte copies ahead of
//! products of a key head's queries with a block of 16 tokens (Flash-Decoding; Dao, Haziza, Massa and Sizov, 2023).

use super::place::{Layout, Sizes};
use super::pool::CubePool;
use crate::cube::attention::flash::{TILE, keys_of_tile, takes_heads};
use crate::cube::cuda::{
    Constant, CudaSource, HEADS, PTX, compute_capability, element_types, fingerprint, launch_cuda,
};
use crate::cube::prelude::*;
use cubecl::ir::attributes::BufferIOAttr::{ReadOnly, ReadWrite, WriteOnly};
use firebrick_spec::BLOCK_SIZE;
use std::sync::LazyLock;

const ATTEND: &str = include_str!("flash_decode/attend.cu");
const IN_ORDER: &str = include_str!("flash_decode/in_order.cu");

/// Query heads of a key head, at most: rows of a left operand.
const MAX_GROUP: usize = 16;

/// Tokens of a block of the pool that the source knows.
const _: () = assert!(BLOCK_SIZE == 16, "attend.cu has 16 tokens in a tile");

/// Elements of a head times warps of a block: each warp has two tiles of keys and values in 48 KiB of shared memory.
const WARP_NUMBERS: usize = 256;

/// Compile-time parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Variant {
    dtype: DType,
    dim: usize,
    scale: Constant,
    /// The soft-cap.
    cap: Option<Constant>,
    sinks: bool,
    biased: bool,
    /// True if a block has a part of a row's columns.
    parted: bool,
}

impl Variant {
    fn warps(&self) -> usize {
        (WARP_NUMBERS / self.dim).clamp(1, 4)
    }

    fn of(pool: &CubePool, layout: &Layout, sizes: Sizes) -> Self {
        let Sizes { dim, capped, .. } = sizes;
        let (dtype, cap) = (pool.keys.dtype, capped.then(|| Constant::new(layout.cap)));
        Self { dtype, dim, scale: Constant::new(layout.scale), cap, sinks: false, biased: false, parted: false }
    }
}

impl CudaSource for Variant {
    fn entry_point(&self) -> &'static str {
        "paged_attend"
    }

    fn threads(&self) -> usize {
        self.warps() * 32
    }

    fn source(&self) -> String {
        let Self { dim, scale, sinks, biased, parted, .. } = *self;
        let (warps, capped, cap) = (self.warps(), self.cap.is_some(), self.cap.unwrap_or(Constant::new(1.0)));
        let out = if parted { "float" } else { "Element" };
        let head = format!(
            "#define WARPGROUPS 0\ntypedef {out} Out;\n\
             static const u32 DIM = {dim}, WARPS = {warps};\n\
             static const bool CAPPED = {capped}, SINKS = {sinks}, BIASED = {biased}, PARTED = {parted};\n\
             static const float SCALE = {scale}, CAP = {cap};\n"
        );
        [&element_types(self.dtype), &head, PTX, HEADS, ATTEND].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let of = |dim| {
                let (dtype, scale, cap) = (DType::BF16, Constant::new(1.0), None);
                Variant { dtype, dim, scale, cap, sinks: false, biased: false, parted: false }.source()
            };
            fingerprint([64, 96, 128, 256].map(of))
        });
        *SOURCES
    }
}

/// Compile-time parameters of the kernel that adds as the forward pass of training does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct InOrder {
    dtype: DType,
    dim: usize,
    scale: Constant,
    /// The soft-cap.
    cap: Option<Constant>,
    sinks: bool,
}

impl CudaSource for InOrder {
    fn entry_point(&self) -> &'static str {
        "paged_attend_in_order"
    }

    fn threads(&self) -> usize {
        32
    }

    fn source(&self) -> String {
        let Self { dim, scale, sinks, .. } = *self;
        let (capped, cap) = (self.cap.is_some(), self.cap.unwrap_or(Constant::new(1.0)));
        let head = format!(
            "#define WARPGROUPS 0\n\
             static const u32 DIM = {dim}, ROWS = 16, WARP_ROWS = 16, OTHERS = {}, TOKENS = {BLOCK_SIZE};\n\
             static const bool CAPPED = {capped}, SINKS = {sinks};\n\
             static const float SCALE = {scale}, CAP = {cap};\n",
            keys_of_tile(dim)
        );
        [&element_types(self.dtype), &head, PTX, HEADS, TILE, IN_ORDER].concat()
    }

    fn fingerprint() -> u64 {
        static SOURCES: LazyLock<u64> = LazyLock::new(|| {
            let of = |dim| {
                let (dtype, scale, cap) = (DType::BF16, Constant::new(1.0), None);
                InOrder { dtype, dim, scale, cap, sinks: false }.source()
            };
            fingerprint([64, 96, 128].map(of))
        });
        *SOURCES
    }
}

/// Returns true if [`Params::attend_in_order`] takes queries in groups of some heads, on a device and in a type.
pub(in crate::cube) fn takes_in_order(like: &CubeTensor, group: usize, dim: usize) -> bool {
    group <= MAX_GROUP && takes_heads(like, dim)
}

/// Returns true if the kernels take queries in groups of some heads and a pool.
pub(super) fn takes(pool: &CubePool, group: usize, dim: usize) -> bool {
    let half = matches!(pool.keys.dtype, DType::BF16 | DType::F16) && pool.scales.is_none();
    let shape = group <= MAX_GROUP && matches!(dim, 64 | 96 | 128 | 256);
    half && shape && compute_capability(&pool.keys).is_some_and(|major| major >= 8)
}

/// The table, pool and sizes of launches.
pub(super) struct Params<'a> {
    pub table: &'a CubeTensor,
    pub pool: &'a CubePool,
    pub layout: &'a Layout,
    pub sizes: Sizes,
}

impl Params<'_> {
    fn launch(&self, variant: Variant, read: [&CubeTensor; 4], out: &CubeTensor, parts: usize) {
        let Layout { rows, stride, kv, group, slots, window, .. } = *self.layout;
        let [queries, bias, angles, sinks] = read;
        let buffers = [
            (queries, ReadOnly),
            (bias, ReadOnly),
            (angles, ReadOnly),
            (sinks, ReadOnly),
            (self.table, ReadOnly),
            (&self.pool.keys, ReadWrite),
            (&self.pool.values, ReadWrite),
            (out, WriteOnly),
        ];
        launch_cuda(variant, [rows * kv * parts, 1], &buffers, &[rows, stride, kv, group, slots, window, parts]);
    }

    /// Attention of whole rows `[queries | keys | values]`, whose new tokens it appends to the pool. `sinks` are f32.
    pub fn attend(
        &self,
        qkv: &CubeTensor,
        bias: Option<&CubeTensor>,
        angles: &CubeTensor,
        sinks: Option<&CubeTensor>,
        out: &CubeTensor,
    ) {
        let variant = Variant {
            sinks: sinks.is_some(),
            biased: bias.is_some(),
            ..Variant::of(self.pool, self.layout, self.sizes)
        };
        // kernels without bias or sinks do not read these buffers
        let read = [qkv, bias.unwrap_or(qkv), angles, sinks.unwrap_or(angles)];
        self.launch(variant, read, out, 1);
    }

    /// Attention of rotated queries to the tokens in the pool, the new ones among them, in the order of sums of the
    /// forward pass of training. `sinks` are f32.
    pub fn attend_in_order(&self, queries: &CubeTensor, sinks: Option<&CubeTensor>, out: &CubeTensor) {
        let Layout { rows, stride, kv, group, slots, window, .. } = *self.layout;
        let Variant { dtype, dim, scale, cap, .. } = Variant::of(self.pool, self.layout, self.sizes);
        let variant = InOrder { dtype, dim, scale, cap, sinks: sinks.is_some() };
        let buffers = [
            (queries, ReadOnly),
            // a kernel without sinks does not read this buffer
            (sinks.unwrap_or(queries), ReadOnly),
            (self.table, ReadOnly),
            (&self.pool.keys, ReadOnly),
            (&self.pool.values, ReadOnly),
            (out, WriteOnly),
        ];
        launch_cuda(variant, [rows * kv, 1], &buffers, &[rows, stride, kv, group, slots, window]);
    }

    /// Attention of rotated queries to parts of the tokens in the pool, to be combined.
    pub fn attend_parts(&self, queries: &CubeTensor, parted: &CubeTensor, parts: usize) {
        let variant = Variant { parted: true, ..Variant::of(self.pool, self.layout, self.sizes) };
        self.launch(variant, [queries, queries, parted, parted], parted, parts);
    }
}
