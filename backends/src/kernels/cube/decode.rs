//! Decode attention: one new token per sequence over its cached keys and values, in one pass over live columns with online softmax.
//!
//! A cube has some query heads of one key head of one row. It rotates them and the new key, writes that and the new value to the
//! cache, and iterates over tiles of columns: [`tile::LANES`] units share a key and multiply it with every query, then each unit has
//! some dimensions of the values. Keys and values are read once per cube, coalesced (`attend`). Where such cubes do not fill the GPU
//! and rows are long, the columns of a row are divided among several cubes (`split`).

mod attend;
mod split;
mod tile;

use super::launch::{
    UNITS, address, cubes, cubes_to_fill, detached, dims, elem, elementwise, empty, integers,
    into_writable, supports,
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

/// Columns from which a row is divided, and the least columns of a part: enough to pay for two more launches.
const LONG: usize = 1024;
const PART: usize = 128;

/// The arguments that launches share.
struct LaunchParams {
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
    /// The soft-cap, or 1 where there is none.
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
    let params = LaunchParams {
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
    // the output replaces the queries: with its own buffer there would be nine
    let [q, k, v] = [into_writable(detached(q)), detached(k), detached(v)];
    let [keys, values] = [keys, values].map(|cache| into_writable(detached(cache)));
    let angles = shape.angles.map(|t| detached(t.clone().cast(DType::F32)));
    debug_assert_eq!(dims(&k), [rows, kv * dim]);
    let tasks = live.rows * kv * params.chunks;
    let parts = parts(&q, tasks, live.longest.min(params.window));
    if parts > 1 {
        split_kv(
            &params,
            [&q, &k, &v],
            [&keys, &values],
            angles,
            tasks,
            parts,
        );
    } else {
        whole_rows(&params, [&q, &k, &v], [&keys, &values], angles);
    }
    Some((Cube::tensor(q), [keys, values].map(Cube::tensor)))
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
fn whole_rows(
    params: &LaunchParams,
    [q, k, v]: [&CubeTensor; 3],
    [keys, values]: [&CubeTensor; 2],
    [cos, sin]: [CubeTensor; 2],
) {
    let tasks = params.rows * params.kv * params.chunks;
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
        params.live.clone().into_buffer_arg(),
        tasks,
        params.kv,
        params.group,
        params.chunks,
        params.columns,
        params.window,
        params.scale,
        params.cap,
        params.capped,
        params.heads,
        params.dim,
        elem(q),
    );
}

/// Three launches, with `parts` cubes for the columns of a row. `tasks` counts only rows that are in a sequence.
fn split_kv(
    params: &LaunchParams,
    [q, k, v]: [&CubeTensor; 3],
    [keys, values]: [&CubeTensor; 2],
    [cos, sin]: [CubeTensor; 2],
    tasks: usize,
    parts: usize,
) {
    let (client, dtype) = (&q.client, elem(q));
    let address = address([keys, values, q]);
    let pairs = params.rows * (params.group + 2) * params.kv * params.dim / 2;
    let (count, dim) = elementwise(q, pairs);
    split::append_kv::launch(
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
        params.live.clone().into_buffer_arg(),
        params.rows,
        params.kv,
        params.group,
        params.columns,
        params.dim,
        dtype,
    );
    let numbers = tasks * parts * split::numbers(params.heads, params.dim);
    let parted = empty(q, [numbers], DType::F32);
    split::attend::launch(
        client,
        cubes(q, tasks * parts),
        CubeDim::new_1d(UNITS as u32),
        address,
        q.clone().into_buffer_arg(),
        keys.clone().into_buffer_arg(),
        values.clone().into_buffer_arg(),
        params.live.clone().into_buffer_arg(),
        parted.clone().into_buffer_arg(),
        tasks,
        parts,
        params.rows,
        params.kv,
        params.group,
        params.chunks,
        params.columns,
        params.window,
        params.scale,
        params.cap,
        params.capped,
        params.heads,
        params.dim,
        dtype,
    );
    let (count, dim) = elementwise(q, q.shape().num_elements());
    split::combine_parts::launch(
        client,
        count,
        dim,
        address,
        parted.into_buffer_arg(),
        params.live.clone().into_buffer_arg(),
        q.clone().into_buffer_arg(),
        parts,
        params.rows,
        params.kv,
        params.group,
        params.chunks,
        params.heads,
        params.dim,
        dtype,
    );
}
