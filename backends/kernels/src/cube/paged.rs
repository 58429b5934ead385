//! A paged KV cache (`PagedAttention`, arXiv:2309.06180): attention of one new token per sequence over the tokens in
//! its blocks, in one pass with online softmax, and what else reads and writes blocks (`cache`).
//!
//! A cube has some query heads of one key head of one row. It rotates them and the new key, writes that and the new
//! value to the pool, and iterates over tiles of columns: [`tile::LANES`] units share a key and multiply it with every
//! query, then each unit has some dimensions of the values. Keys and values are read once per cube, coalesced
//! (`attend`). Where such cubes do not fill the GPU and rows are long, the columns of a row are divided among several
//! cubes (`split`). Queries, keys and values are three tensors, or one with their biases beside it (`joined`).
//!
//! Codes of 8 bits are widened in registers. A key's scale multiplies its product with a query, a value's scale its
//! weight (`codes`).

mod append;
mod attend;
mod cache;
mod codes;
mod joined;
mod pool;
mod split;
mod tile;
mod whole;

pub(super) use cache::{copy_blocks, gather_kv, write_kv};

use super::launch::{
    UNITS, address, cubes, cubes_to_fill, detached, dims, elem, elementwise, empty, integers, into_writable, supports,
};
use crate::autodiff::KernelBackend;
use crate::choice::Operation;
use crate::paged::{KvPool, LONG, PagedAttentionShape};
use crate::shapes::JoinedHeads;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use firebrick_device::trace::span;
use pool::CubePool;
use tile::{HEADS, QUERIES, pack};

/// The least columns of a part: enough to pay for two more launches.
const PART: usize = 128;

/// The new tokens.
enum NewTokens {
    /// Keys and values, `[rows, kv_heads · dim]` each. The queries are where the output will be: with its own buffer
    /// there would be nine.
    Separate { k: CubeTensor, v: CubeTensor },
    /// Queries, keys and values, `[rows, (heads + 2 · kv_heads) · dim]`, and their biases, where they are still to be
    /// added.
    Joined { qkv: CubeTensor, bias: Option<CubeTensor> },
}

/// The arguments that launches share.
struct LaunchParams {
    new: NewTokens,
    out: CubeTensor,
    angles: CubeTensor,
    table: CubeTensor,
    rows: usize,
    stride: usize,
    kv: usize,
    group: usize,
    /// Query heads of a cube, and cubes of a key head.
    heads: usize,
    chunks: usize,
    slots: usize,
    dim: usize,
    window: usize,
    scale: f32,
    /// The soft-cap, or 1 where there is none.
    cap: f32,
    capped: bool,
    /// Sinks of the query heads, f32.
    sinks: Option<CubeTensor>,
}

/// Whether the kernels take tensors of these types beside the first one.
fn takes(first: &Tensor<2>, others: &[DType], pool: &KvPool) -> bool {
    let stored = match pool {
        KvPool::Float { keys, values } => [keys.dtype(), values.dtype()],
        KvPool::Int8 { .. } => [first.dtype(); 2],
    };
    let mut alike = others.iter().chain(&stored);
    supports(Operation::DecodeAttention, first) && alike.all(|&dtype| dtype == first.dtype())
}

/// See [`crate::paged_attention`].
pub(super) fn paged_attention(
    [q, k, v]: [Tensor<2>; 3],
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> Result<(Tensor<2>, KvPool), KvPool> {
    if !takes(&q, &[k.dtype(), v.dtype()], &pool) {
        return Err(pool);
    }
    attend(pool, shape, || {
        let new = NewTokens::Separate { k: detached(k), v: detached(v) };
        (into_writable(detached(q)), new)
    })
}

/// See [`crate::paged_attention_joined`].
pub(super) fn paged_attention_joined(
    qkv: &Tensor<2>,
    bias: Option<&Tensor<2>>,
    heads: JoinedHeads,
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> Result<(Tensor<2>, KvPool), KvPool> {
    let biases: Vec<DType> = bias.iter().map(|bias| bias.dtype()).collect();
    if !takes(qkv, &biases, &pool) || qkv.dims()[1] != heads.width() {
        return Err(pool);
    }
    attend(pool, shape, || {
        let qkv = detached(qkv.clone());
        let [rows, _] = dims(&qkv);
        let out = empty(&qkv, [rows, heads.queries * heads.dim], qkv.dtype);
        let bias = bias.map(|bias| detached(bias.clone()));
        (out, NewTokens::Joined { qkv, bias })
    })
}

/// Attention of new tokens, which come with the buffer of the output.
fn attend(
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
    new: impl FnOnce() -> (CubeTensor, NewTokens),
) -> Result<(Tensor<2>, KvPool), KvPool> {
    let on_device = (&shape.tables.on_device, &shape.angles.on_device);
    let (Some(tables), Some(angles)) = on_device else {
        return Err(pool);
    };
    let _span = span("decode attention", 0.0);
    let (out, new) = new();
    let [rows, width] = dims(&out);
    let pool = CubePool::open_writable(pool);
    let [kv, slots, each] = dims(pool.keys());
    let dim = each * pack(matches!(pool, CubePool::Int8 { .. }));
    let group = width / dim / kv;
    let heads = group.min(HEADS).min((QUERIES / dim).max(1));
    let whole = shape.window.unwrap_or(usize::MAX);
    let params = LaunchParams {
        new,
        out,
        angles: detached(angles.clone()),
        table: integers(&tables.table),
        rows,
        stride: tables.stride,
        kv,
        group,
        heads,
        chunks: group.div_ceil(heads),
        slots,
        dim,
        window: whole.min(tables.most),
        scale: shape.scale as f32,
        cap: shape.softcap.unwrap_or(1.0) as f32,
        capped: shape.softcap.is_some(),
        sinks: shape.sinks.map(|sinks| detached(sinks.clone().cast(DType::F32))),
    };
    let tasks = rows * kv * params.chunks;
    let parts = parts(&params.out, tasks, whole.min(tables.longest));
    // sinks join where parts are combined: the other kernels have no buffer left for them
    if parts > 1 || params.sinks.is_some() {
        split_kv(&params, &pool, tasks, parts);
    } else {
        whole_rows(&params, &pool, tasks);
    }
    Ok((Cube::tensor(params.out), pool.close()))
}

/// Parts into which the columns of a row are divided, so that cubes fill the GPU.
fn parts(like: &CubeTensor, tasks: usize, longest: usize) -> usize {
    if longest < LONG || tasks == 0 { 1 } else { cubes_to_fill(like).div_ceil(tasks).clamp(1, longest / PART) }
}

/// One launch, with a cube for all columns of a row.
fn whole_rows(params: &LaunchParams, pool: &CubePool, tasks: usize) {
    let out = &params.out;
    macro_rules! launch {
        ($file:ident::$kernel:ident, [$($first:expr),*], [$($pool:expr),*], [$($last:expr),*], [$($biased:expr),*]) => {{
            $file::$kernel::launch(
                &out.client,
                cubes(out, tasks),
                CubeDim::new_1d(UNITS as u32),
                address([pool.keys(), out]),
                $($first.clone().into_buffer_arg(),)*
                $($pool.clone().into_buffer_arg(),)*
                params.angles.clone().into_buffer_arg(),
                params.table.clone().into_buffer_arg(),
                $($last.clone().into_buffer_arg(),)*
                tasks,
                params.rows,
                params.stride,
                params.kv,
                params.group,
                params.chunks,
                params.slots,
                params.window,
                params.scale,
                params.cap,
                $($biased,)*
                params.capped,
                params.heads,
                params.dim,
                elem(out),
            )
        }};
    }
    match (&params.new, pool) {
        (NewTokens::Separate { k, v }, CubePool::Float { keys, values }) => {
            launch!(whole::attend, [out, k, v], [keys, values], [], []);
        }
        (NewTokens::Separate { k, v }, CubePool::Int8 { keys, values, scales }) => {
            launch!(whole::attend_int8, [out, k, v], [keys, values, scales], [], []);
        }
        (NewTokens::Joined { qkv, bias }, CubePool::Float { keys, values }) => {
            let (biased, bias) = (bias.is_some(), bias.as_ref().unwrap_or(qkv));
            launch!(joined::attend, [qkv, bias], [keys, values], [out], [biased]);
        }
        (NewTokens::Joined { qkv, bias }, CubePool::Int8 { keys, values, scales }) => {
            let (biased, bias) = (bias.is_some(), bias.as_ref().unwrap_or(qkv));
            launch!(joined::attend_int8, [qkv, bias], [keys, values, scales], [out], [biased]);
        }
    }
}

/// The first launch of a divided attention: new tokens go to the pool, rotated queries to the output.
fn append(params: &LaunchParams, pool: &CubePool) {
    let out = &params.out;
    let tasks = params.rows * params.kv;
    macro_rules! launch {
        ($file:ident::$kernel:ident, [$($first:expr),*], [$($pool:expr),*], [$($last:expr),*], [$($biased:expr),*]) => {{
            $file::$kernel::launch(
                &out.client,
                cubes(out, tasks),
                CubeDim::new_1d(UNITS as u32),
                address([pool.keys(), out]),
                $($first.clone().into_buffer_arg(),)*
                $($pool.clone().into_buffer_arg(),)*
                params.angles.clone().into_buffer_arg(),
                params.table.clone().into_buffer_arg(),
                $($last.clone().into_buffer_arg(),)*
                tasks,
                params.rows,
                params.stride,
                params.kv,
                params.group,
                params.slots,
                $($biased,)*
                params.dim,
                elem(out),
            )
        }};
    }
    match (&params.new, pool) {
        (NewTokens::Separate { k, v }, CubePool::Float { keys, values }) => {
            launch!(split::append, [out, k, v], [keys, values], [], []);
        }
        (NewTokens::Separate { k, v }, CubePool::Int8 { keys, values, scales }) => {
            launch!(split::append_int8, [out, k, v], [keys, values, scales], [], []);
        }
        (NewTokens::Joined { qkv, bias }, CubePool::Float { keys, values }) => {
            let (biased, bias) = (bias.is_some(), bias.as_ref().unwrap_or(qkv));
            launch!(joined::append, [qkv, bias], [keys, values], [out], [biased]);
        }
        (NewTokens::Joined { qkv, bias }, CubePool::Int8 { keys, values, scales }) => {
            let (biased, bias) = (bias.is_some(), bias.as_ref().unwrap_or(qkv));
            launch!(joined::append_int8, [qkv, bias], [keys, values, scales], [out], [biased]);
        }
    }
}

/// Three launches, with `parts` cubes for the columns of a row.
fn split_kv(params: &LaunchParams, pool: &CubePool, tasks: usize, parts: usize) {
    append(params, pool);
    let q = &params.out;
    let address = address([pool.keys(), q]);
    let numbers = tasks * parts * split::numbers(params.heads, params.dim);
    let parted = empty(q, [numbers], DType::F32);
    macro_rules! attend {
        ($kernel:ident, $($tensor:expr),*) => {
            split::$kernel::launch(
                &q.client,
                cubes(q, tasks * parts),
                CubeDim::new_1d(UNITS as u32),
                address,
                q.clone().into_buffer_arg(),
                $($tensor.clone().into_buffer_arg(),)*
                params.table.clone().into_buffer_arg(),
                parted.clone().into_buffer_arg(),
                tasks,
                parts,
                params.rows,
                params.stride,
                params.kv,
                params.group,
                params.chunks,
                params.slots,
                params.window,
                params.scale,
                params.cap,
                params.capped,
                params.heads,
                params.dim,
                elem(q),
            )
        };
    }
    match pool {
        CubePool::Float { keys, values } => attend!(attend, keys, values),
        CubePool::Int8 { keys, values, scales } => attend!(attend_int8, keys, values, scales),
    }
    let (count, dim) = elementwise(q, q.shape().num_elements());
    // any f32 buffer stands in where there are none
    let sinks = params.sinks.as_ref().unwrap_or(&parted).clone();
    split::combine_parts::launch(
        &q.client,
        count,
        dim,
        address,
        parted.clone().into_buffer_arg(),
        params.table.clone().into_buffer_arg(),
        sinks.into_buffer_arg(),
        q.clone().into_buffer_arg(),
        parts,
        params.rows,
        params.kv,
        params.group,
        params.chunks,
        params.sinks.is_some(),
        params.heads,
        params.dim,
        elem(q),
    );
}
