//! Attention of one new token a sequence over its cached keys and values: one pass over live columns, with softmax as it goes.
//!
//! A cube has some query heads of one key head of one row. It turns them and the new key, writes that and the new value to the
//! cache, and takes columns a few at a time: [`LANES`] units have a key between them and multiply it by every query, then each
//! unit has some dimensions of the values. A key and a value are read once a cube, side by side (`attend`). Where there are too few
//! such cubes for a GPU, and columns enough, the columns of a row are divided among several (`split`).

mod attend;
mod split;
mod tile;

use super::launch::{
    UNITS, address, cubes, detached, dims, elem, elementwise, empty, integers, into_writable,
    supports, wanted_cubes,
};
use crate::kernels::autodiff::KernelBackend;
use crate::kernels::choice::Operation;
use crate::kernels::shapes::DecodeShape;
use crate::trace::span;
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use tile::{HEADS, QUERIES};

/// Columns from which a row is divided, and the least that a part has: two launches more have to be worth it.
const LONG: usize = 1024;
const PART: usize = 128;

/// What launches are told.
struct Told {
    live: CubeTensor,
    rows: usize,
    kv: usize,
    group: usize,
    /// Query heads of a cube, and cubes of a key head.
    heads: usize,
    chunks: usize,
    columns: usize,
    dim: usize,
    window: usize,
    scale: f32,
    /// One where scores have none.
    cap: f32,
    capped: bool,
}

/// See [`crate::kernels::decode_attention`].
pub(super) fn decode_attention(
    [q, k, v]: [Tensor<2>; 3],
    [keys, values]: [Tensor<4>; 2],
    shape: &DecodeShape<'_>,
) -> Option<(Tensor<2>, [Tensor<4>; 2])> {
    let live = shape.decoded.live.as_ref()?;
    let alike = [k.dtype(), v.dtype(), keys.dtype(), values.dtype()];
    if !supports(Operation::DecodeAttention, &q) || alike.iter().any(|&dtype| dtype != q.dtype()) {
        return None;
    }
    let _span = span("decode attention", 0.0);
    let [rows, width] = q.dims();
    let [_, kv, columns, dim] = keys.dims();
    let group = width / dim / kv;
    let heads = group.min(HEADS).min((QUERIES / dim).max(1));
    let told = Told {
        live: integers(&live.table),
        rows,
        kv,
        group,
        heads,
        chunks: group.div_ceil(heads),
        columns,
        dim,
        window: shape.window.unwrap_or(columns).min(columns),
        scale: shape.scale as f32,
        cap: shape.softcap.unwrap_or(1.0) as f32,
        capped: shape.softcap.is_some(),
    };
    // the mixed values take the place of the queries: with a buffer of their own there would be nine
    let [q, k, v] = [into_writable(detached(q)), detached(k), detached(v)];
    let [keys, values] = [keys, values].map(|cache| into_writable(detached(cache)));
    let angles = shape.angles.map(|t| detached(t.clone().cast(DType::F32)));
    debug_assert_eq!(dims(&k), [rows, kv * dim]);
    let tasks = live.rows * kv * told.chunks;
    let parts = parts(&q, tasks, live.longest.min(told.window));
    if parts > 1 {
        in_parts(&told, [&q, &k, &v], [&keys, &values], angles, tasks, parts);
    } else {
        whole(&told, [&q, &k, &v], [&keys, &values], angles);
    }
    Some((Cube::tensor(q), [keys, values].map(Cube::tensor)))
}

/// Cubes among which the columns of a row are divided, so that there are enough for all cores.
fn parts(like: &CubeTensor, tasks: usize, longest: usize) -> usize {
    if longest < LONG || tasks == 0 {
        1
    } else {
        wanted_cubes(like).div_ceil(tasks).clamp(1, longest / PART)
    }
}

fn whole(
    told: &Told,
    [q, k, v]: [&CubeTensor; 3],
    [keys, values]: [&CubeTensor; 2],
    [cos, sin]: [CubeTensor; 2],
) {
    let tasks = told.rows * told.kv * told.chunks;
    attend::attend::launch(
        &q.client,
        cubes(q, tasks),
        CubeDim::new_1d(UNITS as u32),
        address([keys, values, q]),
        q.clone().into_buffer_arg(),
        k.clone().into_buffer_arg(),
        v.clone().into_buffer_arg(),
        keys.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        cos.into_buffer_arg(),
        sin.into_buffer_arg(),
        told.live.clone().into_buffer_arg(),
        tasks,
        told.kv,
        told.group,
        told.chunks,
        told.columns,
        told.window,
        told.scale,
        told.cap,
        told.capped,
        told.heads,
        told.dim,
        elem(q),
    );
}

/// `tasks` are those of rows in a sequence alone.
fn in_parts(
    told: &Told,
    [q, k, v]: [&CubeTensor; 3],
    [keys, values]: [&CubeTensor; 2],
    [cos, sin]: [CubeTensor; 2],
    tasks: usize,
    parts: usize,
) {
    let (client, dtype) = (&q.client, elem(q));
    let address = address([keys, values, q]);
    let pairs = told.rows * (told.group + 2) * told.kv * told.dim / 2;
    let (count, dim) = elementwise(q, pairs);
    split::enter::launch(
        client,
        count,
        dim,
        address,
        q.clone().into_buffer_arg(),
        k.clone().into_buffer_arg(),
        v.clone().into_buffer_arg(),
        keys.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        cos.into_buffer_arg(),
        sin.into_buffer_arg(),
        told.live.clone().into_buffer_arg(),
        told.rows,
        told.kv,
        told.group,
        told.columns,
        told.dim,
        dtype,
    );
    let numbers = tasks * parts * split::numbers(told.heads, told.dim);
    let parted = empty(q, [numbers], DType::F32);
    split::attend::launch(
        client,
        cubes(q, tasks * parts),
        CubeDim::new_1d(UNITS as u32),
        address,
        q.clone().into_buffer_arg(),
        keys.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        told.live.clone().into_buffer_arg(),
        parted.clone().into_buffer_arg(),
        tasks,
        parts,
        told.rows,
        told.kv,
        told.group,
        told.chunks,
        told.columns,
        told.window,
        told.scale,
        told.cap,
        told.capped,
        told.heads,
        told.dim,
        dtype,
    );
    let (count, dim) = elementwise(q, q.shape().num_elements());
    split::join::launch(
        client,
        count,
        dim,
        address,
        parted.into_buffer_arg(),
        told.live.clone().into_buffer_arg(),
        q.clone().into_buffer_arg(),
        parts,
        told.rows,
        told.kv,
        told.group,
        told.chunks,
        told.heads,
        told.dim,
        dtype,
    );
}
