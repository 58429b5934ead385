//! Slots of a pool: written, copied, read.

use super::super::launch::{RowGrid, UNITS, address, detached, dims, elem, elementwise, empty, integers};
use super::codes::{encoded, magnitude, placed, scale_bits, scale_of, widen};
use super::pool::CubePool;
use super::tile::pack;
use crate::autodiff::KernelBackend;
use crate::paged::{KvPool, SlotMapping};
use burn::backend::{Cube, TensorMetadata};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::cubecl;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;
use firebrick_device::trace::span;
use firebrick_spec::BLOCK_SIZE;

/// Slots on the device, which must all be in a pool of `slots` slots.
fn mapped(mapping: &SlotMapping, slots: usize) -> CubeTensor {
    for &slot in &mapping.slots {
        assert!((slot as usize) < slots, "slot {slot} of a pool of {slots} slots");
    }
    let on_device = mapping.on_device.as_ref();
    integers(on_device.expect("slots for the pool's device"))
}

/// See [`crate::write_kv`].
pub(crate) fn write_kv(pool: KvPool, kv: [&Tensor<3>; 2], mapping: &SlotMapping) -> KvPool {
    let [tokens, heads, dim] = kv[0].dims();
    assert_eq!(tokens, mapping.len(), "a slot for every token");
    if tokens == 0 {
        return pool;
    }
    let _span = span("KV cache", 0.0);
    let mapping = mapped(mapping, pool.slots());
    let slots = pool.slots();
    let pool = CubePool::open_writable(pool);
    match &pool {
        CubePool::Float { keys, values } => {
            let [k, v] = kv.map(|x| detached(x.clone().cast(keys.dtype)));
            let (count, dims) = elementwise(&k, tokens * heads * dim);
            write::launch(
                &k.client.clone(),
                count,
                dims,
                address([keys, values, &k]),
                keys.clone().into_buffer_arg(),
                values.clone().into_buffer_arg(),
                k.into_buffer_arg(),
                v.into_buffer_arg(),
                mapping.into_buffer_arg(),
                tokens,
                heads,
                slots,
                dim,
                elem(keys),
            );
        }
        CubePool::Int8 { keys, values, scales } => {
            let [k, v] = kv.map(|x| detached(x.clone()));
            let grid = RowGrid::of(dim);
            let dtype = elem(&k);
            write_int8::launch(
                &k.client.clone(),
                grid.count(&k, tokens * heads),
                grid.dim(),
                address([keys, values, &k]),
                keys.clone().into_buffer_arg(),
                values.clone().into_buffer_arg(),
                scales.clone().into_buffer_arg(),
                k.into_buffer_arg(),
                v.into_buffer_arg(),
                mapping.into_buffer_arg(),
                tokens,
                heads,
                slots,
                dim,
                grid.units,
                grid.rows,
                dtype,
            );
        }
    }
    pool.close()
}

/// See [`crate::copy_blocks`].
pub(crate) fn copy_blocks(pool: KvPool, pairs: &[(u32, u32)]) -> KvPool {
    if pairs.is_empty() {
        return pool;
    }
    let _span = span("KV cache", 0.0);
    let blocks = pool.slots() / BLOCK_SIZE;
    let both = pairs.iter().flat_map(|&(from, to)| [from, to]);
    let both: Vec<i32> = both
        .map(|block| {
            assert!((block as usize) < blocks, "block {block} of a pool of {blocks} blocks");
            block as i32
        })
        .collect();
    let shape = [both.len()];
    let both: Tensor<1, Int> = Tensor::from_data(TensorData::new(both, shape), (&pool.device(), DType::I32));
    let both = integers(&both);
    let pool = CubePool::open_writable(pool);
    let copied = |tensor: &CubeTensor, each: usize| {
        let [heads, slots] = [tensor.shape()[0], tensor.shape()[1]];
        let elements = heads * pairs.len() * BLOCK_SIZE * each;
        let (count, dim) = elementwise(tensor, elements);
        copy::launch(
            &tensor.client,
            count,
            dim,
            address([tensor]),
            tensor.clone().into_buffer_arg(),
            both.clone().into_buffer_arg(),
            pairs.len(),
            heads,
            slots,
            each,
            elem(tensor),
        );
    };
    let [_, _, each] = dims(pool.keys());
    match &pool {
        CubePool::Float { keys, values } => {
            copied(keys, each);
            copied(values, each);
        }
        CubePool::Int8 { keys, values, scales } => {
            copied(keys, each);
            copied(values, each);
            copied(scales, 1);
        }
    }
    pool.close()
}

/// See [`crate::gather_kv`].
pub(crate) fn gather_kv(pool: &KvPool, mapping: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
    let tokens = mapping.len();
    if tokens == 0 {
        let [heads, dim] = match pool {
            KvPool::Float { keys, .. } => [keys.dims()[0], keys.dims()[2]],
            KvPool::Int8 { keys, .. } => [keys.dims()[0], keys.dims()[2] * pack(true)],
        };
        return std::array::from_fn(|_| Tensor::empty([heads, 0, dim], (&pool.device(), dtype)));
    }
    let _span = span("KV cache", 0.0);
    let mapping = mapped(mapping, pool.slots());
    let pool = CubePool::open(pool.clone());
    let [heads, slots, each] = dims(pool.keys());
    let gathered = match &pool {
        CubePool::Float { keys, values } => [keys, values].map(|from| {
            let out = empty(from, [heads, tokens, each], dtype);
            let (count, dim) = elementwise(&out, heads * tokens * each);
            gather::launch(
                &out.client,
                count,
                dim,
                address([from, &out]),
                from.clone().into_buffer_arg(),
                mapping.clone().into_buffer_arg(),
                out.clone().into_buffer_arg(),
                tokens,
                heads,
                slots,
                each,
                elem(from),
                elem(&out),
            );
            out
        }),
        CubePool::Int8 { keys, values, scales } => [(keys, false), (values, true)].map(|(from, high)| {
            let out = empty(from, [heads, tokens, each * pack(true)], dtype);
            let (count, dim) = elementwise(&out, heads * tokens * each);
            gather_int8::launch(
                &out.client,
                count,
                dim,
                address([from, &out]),
                from.clone().into_buffer_arg(),
                scales.clone().into_buffer_arg(),
                mapping.clone().into_buffer_arg(),
                out.clone().into_buffer_arg(),
                tokens,
                heads,
                slots,
                each,
                high,
                elem(&out),
            );
            out
        }),
    };
    gathered.map(Cube::tensor)
}

/// Writes keys and values to slots of a pool in a float type. A unit has an element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn write<F: Float>(
    keys: &mut [F],
    values: &mut [F],
    k: &[F],
    v: &[F],
    mapping: &[i32],
    tokens: usize,
    kv: usize,
    slots: usize,
    dim: usize,
    #[define(F)] _dtype: ElemType,
) {
    let head = ABSOLUTE_POS / dim % kv;
    let token = ABSOLUTE_POS / (dim * kv);
    if token < tokens {
        let slot = head * slots + mapping[token] as usize;
        let at = slot * dim + ABSOLUTE_POS % dim;
        keys[at] = k[ABSOLUTE_POS];
        values[at] = v[ABSOLUTE_POS];
    }
}

/// Encodes a row of numbers, each row by the units of one `UNIT_POS_Y`. Gives the bits of its scale.
#[cube]
fn encode_row<F: Float>(
    numbers: &[F],
    words: &mut [i32],
    lanes: &mut Shared<[u32]>,
    from: usize,
    to: usize,
    writes: bool,
    dim: usize,
    #[comptime] units: usize,
) -> u32 {
    let lane = UNIT_POS_X as usize;
    let first = UNIT_POS_Y as usize * units;
    let mut largest = 0u32;
    if writes {
        let mut i = lane;
        while i < dim {
            largest = max(largest, magnitude(f32::cast_from(numbers[from + i])));
            i += units;
        }
    }
    lanes[first + lane] = largest;
    sync_cube();
    let steps = comptime!(units.ilog2() as usize);
    #[unroll]
    for step in 0..steps {
        let half = comptime!(units >> (step + 1));
        if lane < half {
            let other = lanes[first + lane + half];
            lanes[first + lane] = max(lanes[first + lane], other);
        }
        sync_cube();
    }
    let bits = scale_bits(lanes[first]);
    sync_cube();
    if writes {
        let mut i = lane;
        while i < dim / comptime!(pack(true)) {
            let mut word = 0i32;
            #[unroll]
            for j in 0..comptime!(pack(true)) {
                let x = f32::cast_from(numbers[from + i * comptime!(pack(true)) + j]);
                word |= placed(encoded(x, bits), j);
            }
            words[to + i] = word;
            i += units;
        }
    }
    bits
}

/// Writes keys and values to slots of a pool in 8 bits. A row of units has a head of a token.
#[cube(launch, address_type = "dynamic")]
pub(super) fn write_int8<F: Float>(
    keys: &mut [i32],
    values: &mut [i32],
    scales: &mut [i32],
    k: &[F],
    v: &[F],
    mapping: &[i32],
    tokens: usize,
    kv: usize,
    slots: usize,
    dim: usize,
    #[comptime] units: usize,
    #[comptime] rows: usize,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[u32]>::new_slice(UNITS);
    let row = CUBE_POS * rows + UNIT_POS_Y as usize;
    let token = row / kv;
    let writes = token < tokens;
    let slot = row % kv * slots + mapping[min(token, tokens - 1)] as usize;
    let (from, to) = (row * dim, slot * (dim / comptime!(pack(true))));
    let key = encode_row::<F>(k, keys, &mut lanes, from, to, writes, dim, units);
    let value = encode_row::<F>(v, values, &mut lanes, from, to, writes, dim, units);
    if writes && UNIT_POS_X == 0 {
        scales[slot] = i32::reinterpret(key | (value << 16u32));
    }
}

/// Copies blocks of a tensor with `each` elements a slot. `pairs` are sources and targets. A unit has an element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn copy<P: Numeric>(
    pool: &mut [P],
    pairs: &[i32],
    count: usize,
    kv: usize,
    slots: usize,
    each: usize,
    #[define(P)] _dtype: ElemType,
) {
    let block = each * BLOCK_SIZE;
    let pair = ABSOLUTE_POS / block % count;
    let head = ABSOLUTE_POS / (block * count);
    if head < kv {
        let first = head * slots * each + ABSOLUTE_POS % block;
        let from = pairs[2 * pair] as usize;
        let to = pairs[2 * pair + 1] as usize;
        pool[first + to * block] = pool[first + from * block];
    }
}

/// Reads slots of a pool in a float type. A unit has an element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gather<P: Float, F: Float>(
    pool: &[P],
    mapping: &[i32],
    out: &mut [F],
    tokens: usize,
    kv: usize,
    slots: usize,
    dim: usize,
    #[define(P)] _stored: ElemType,
    #[define(F)] _dtype: ElemType,
) {
    let token = ABSOLUTE_POS / dim % tokens;
    let head = ABSOLUTE_POS / (dim * tokens);
    if head < kv {
        let slot = head * slots + mapping[token] as usize;
        out[ABSOLUTE_POS] = F::cast_from(pool[slot * dim + ABSOLUTE_POS % dim]);
    }
}

/// Reads slots of a pool in 8 bits, whose scales are in the low or the high half of `scales`. A unit has a word.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gather_int8<F: Float>(
    pool: &[i32],
    scales: &[i32],
    mapping: &[i32],
    out: &mut [F],
    tokens: usize,
    kv: usize,
    slots: usize,
    words: usize,
    #[comptime] high: bool,
    #[define(F)] _dtype: ElemType,
) {
    let token = ABSOLUTE_POS / words % tokens;
    let head = ABSOLUTE_POS / (words * tokens);
    if head < kv {
        let slot = head * slots + mapping[token] as usize;
        let bits = u32::reinterpret(scales[slot]) >> comptime!(if high { 16u32 } else { 0u32 });
        let scale = scale_of(bits);
        let mut numbers = Array::<f32>::new(comptime!(pack(true)));
        widen::<i32>(pool[slot * words + ABSOLUTE_POS % words], &mut numbers, true);
        #[unroll]
        for j in 0..comptime!(pack(true)) {
            out[ABSOLUTE_POS * comptime!(pack(true)) + j] = F::cast_from(numbers[j] * scale);
        }
    }
}
