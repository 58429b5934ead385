//! A paged KV cache (`PagedAttention`, arXiv:2309.06180): attention of one new token per sequence over the tokens in its blocks, in one
//! pass with online softmax, and what else reads and writes blocks (`cache`).
//!
//! A cube has some query heads of one key head of one row. It rotates them and the new key, writes that and the new value to the
//! pool, and iterates over tiles of columns: [`tile::LANES`] units share a key and multiply it with every query, then each unit has
//! some dimensions of the values. Keys and values are read once per cube, coalesced (`attend`). Where such cubes do not fill the GPU
//! and rows are long, the columns of a row are divided among several cubes (`split`).
//!
//! Codes of 8 bits are widened in registers. A key's scale multiplies its product with a query, a value's scale its weight (`codes`).

mod append;
mod attend;
mod cache;
mod codes;
mod pool;
mod split;
mod tile;
mod whole;

pub(super) use cache::{copy_blocks, gather_kv, write_kv};

use super::launch::{
    UNITS, address, cubes, cubes_to_fill, detached, dims, elem, elementwise, empty, integers,
    into_writable, supports,
};
use crate::kernels::autodiff::KernelBackend;
use crate::kernels::choice::Operation;
use crate::kernels::paged::{KvPool, PagedAttentionShape};
use crate::trace::span;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use pool::CubePool;
use tile::{HEADS, QUERIES, pack};

/// Columns from which a row is divided, and the least columns of a part: enough to pay for two more launches.
const LONG: usize = 1024;
const PART: usize = 128;

/// The arguments that launches share.
struct LaunchParams {
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    angles: CubeTensor,
    table: CubeTensor,
    rows: usize,
    /// Rows in a sequence.
    live: usize,
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
}

/// See [`crate::kernels::paged_attention`].
pub(super) fn paged_attention(
    [q, k, v]: [Tensor<2>; 3],
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> Result<(Tensor<2>, KvPool), KvPool> {
    let stored = match &pool {
        KvPool::Float { keys, values } => [keys.dtype(), values.dtype()],
        KvPool::Int8 { .. } => [q.dtype(); 2],
    };
    let alike = [k.dtype(), v.dtype(), stored[0], stored[1]];
    let taken =
        supports(Operation::DecodeAttention, &q) && alike.iter().all(|&dtype| dtype == q.dtype());
    let on_device = (&shape.tables.on_device, &shape.angles.on_device);
    let (Some(tables), Some(angles), true) = (on_device.0, on_device.1, taken) else {
        return Err(pool);
    };
    let _span = span("decode attention", 0.0);
    let [rows, width] = q.dims();
    let pool = CubePool::open_writable(pool);
    let [kv, slots, each] = dims(pool.keys());
    let dim = each * pack(matches!(pool, CubePool::Int8 { .. }));
    let group = width / dim / kv;
    let heads = group.min(HEADS).min((QUERIES / dim).max(1));
    let window = shape.window.unwrap_or(tables.longest).min(tables.longest);
    let params = LaunchParams {
        // the output replaces the queries: with its own buffer there would be nine
        q: into_writable(detached(q)),
        k: detached(k),
        v: detached(v),
        angles: detached(angles.clone()),
        table: integers(&tables.table),
        rows,
        live: tables.rows,
        stride: tables.stride,
        kv,
        group,
        heads,
        chunks: group.div_ceil(heads),
        slots,
        dim,
        window,
        scale: shape.scale as f32,
        cap: shape.softcap.unwrap_or(1.0) as f32,
        capped: shape.softcap.is_some(),
    };
    debug_assert_eq!(dims(&params.k), [rows, kv * dim]);
    let tasks = params.live * kv * params.chunks;
    let parts = parts(&params.q, tasks, window);
    if parts > 1 {
        split_kv(&params, &pool, tasks, parts);
    } else {
        whole_rows(&params, &pool);
    }
    Ok((Cube::tensor(params.q), pool.close()))
}

/// Parts into which the columns of a row are divided, so that cubes fill the GPU.
fn parts(like: &CubeTensor, tasks: usize, longest: usize) -> usize {
    if longest < LONG || tasks == 0 {
        1
    } else {
        cubes_to_fill(like).div_ceil(tasks).clamp(1, longest / PART)
    }
}

/// One launch, with a cube for all columns of a row.
fn whole_rows(params: &LaunchParams, pool: &CubePool) {
    let q = &params.q;
    let tasks = params.rows * params.kv * params.chunks;
    macro_rules! launch {
        ($kernel:ident, $($tensor:expr),*) => {
            whole::$kernel::launch(
                &q.client,
                cubes(q, tasks),
                CubeDim::new_1d(UNITS as u32),
                address([pool.keys(), q]),
                q.clone().into_buffer_arg(),
                params.k.clone().into_buffer_arg(),
                params.v.clone().into_buffer_arg(),
                $($tensor.clone().into_buffer_arg(),)*
                params.angles.clone().into_buffer_arg(),
                params.table.clone().into_buffer_arg(),
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
                params.capped,
                params.heads,
                params.dim,
                elem(q),
            )
        };
    }
    match pool {
        CubePool::Float { keys, values } => launch!(attend, keys, values),
        CubePool::Int8 {
            keys,
            values,
            scales,
        } => launch!(attend_int8, keys, values, scales),
    }
}

/// Three launches, with `parts` cubes for the columns of a row. `tasks` counts only rows that are in a sequence.
fn split_kv(params: &LaunchParams, pool: &CubePool, tasks: usize, parts: usize) {
    let q = &params.q;
    let address = address([pool.keys(), q]);
    macro_rules! append {
        ($kernel:ident, $($tensor:expr),*) => {
            split::$kernel::launch(
                &q.client,
                cubes(q, params.live * params.kv),
                CubeDim::new_1d(UNITS as u32),
                address,
                q.clone().into_buffer_arg(),
                params.k.clone().into_buffer_arg(),
                params.v.clone().into_buffer_arg(),
                $($tensor.clone().into_buffer_arg(),)*
                params.angles.clone().into_buffer_arg(),
                params.table.clone().into_buffer_arg(),
                params.live * params.kv,
                params.rows,
                params.stride,
                params.kv,
                params.group,
                params.slots,
                params.dim,
                elem(q),
            )
        };
    }
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
        CubePool::Float { keys, values } => {
            append!(append, keys, values);
            attend!(attend, keys, values);
        }
        CubePool::Int8 {
            keys,
            values,
            scales,
        } => {
            append!(append_int8, keys, values, scales);
            attend!(attend_int8, keys, values, scales);
        }
    }
    let (count, dim) = elementwise(q, q.shape().num_elements());
    split::combine_parts::launch(
        &q.client,
        count,
        dim,
        address,
        parted.into_buffer_arg(),
        params.table.clone().into_buffer_arg(),
        q.clone().into_buffer_arg(),
        parts,
        params.rows,
        params.kv,
        params.group,
        params.chunks,
        params.heads,
        params.dim,
        elem(q),
    );
}
