//! Slots of a pool: written, copied, read.

use super::super::packed::codes::placed;
use super::codes::{CODES, encoded, magnitude, scale_bits, scale_of};
use super::pool::CubePool;
use super::storage::{FloatPool, Int8Pool, Kind, Storage};
use crate::cube::prelude::*;
use crate::paged::{KvPool, SlotMapping};
use crate::shapes::int_tensor;
use firebrick_spec::BLOCK_SIZE;

/// Slots on the device, which must all be in a pool of `slots` slots.
fn mapped(mapping: &SlotMapping, slots: usize) -> CubeTensor {
    for &slot in mapping.slots() {
        assert!((slot as usize) < slots, "slot {slot} of a pool of {slots} slots");
    }
    integers(mapping.on_device().expect("slots for the pool's device"))
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
    let CubePool { keys, values, scales } = &pool;
    match scales {
        None => {
            let [k, v] = kv.map(|x| detached(x.clone().cast(keys.dtype)));
            let grid = Grid::elements([keys, values, &k], tokens * heads * dim);
            launch!(write, grid, [keys, values, k, v, mapping], tokens, heads, slots, dim, elem(keys));
        }
        Some(scales) => {
            let [k, v] = kv.map(|x| detached(x.clone()));
            let (grid, dtype) = (RowGrid::new(dim), elem(&k));
            let cubes = grid.cubes([keys, values, &k], tokens * heads);
            launch!(write_int8, cubes, [keys, values, scales, k, v, mapping], tokens, heads, slots, dim, grid, dtype);
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
    let flat = pairs.iter().flat_map(|&(from, to)| [from, to]);
    let flat: Vec<i32> = flat
        .map(|block| {
            assert!((block as usize) < blocks, "block {block} of a pool of {blocks} blocks");
            block as i32
        })
        .collect();
    let flat = integers(&int_tensor(flat, &pool.device()));
    let pool = CubePool::open_writable(pool);
    for tensor in pool.tensors() {
        let [heads, slots] = [tensor.shape()[0], tensor.shape()[1]];
        let each = tensor.shape().num_elements() / (heads * slots);
        let grid = Grid::elements([tensor], heads * pairs.len() * BLOCK_SIZE * each);
        launch!(copy, grid, [tensor, &flat], pairs.len(), heads, slots, each, elem(tensor));
    }
    pool.close()
}

/// See [`crate::gather_kv`].
pub(crate) fn gather_kv(pool: &KvPool, mapping: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
    let tokens = mapping.len();
    if tokens == 0 {
        let [heads, dim] = match pool {
            KvPool::Float { keys, .. } => [keys.dims()[0], keys.dims()[2]],
            KvPool::Int8 { keys, .. } => [keys.dims()[0], keys.dims()[2] * CODES],
        };
        return std::array::from_fn(|_| Tensor::empty([heads, 0, dim], (&pool.device(), dtype)));
    }
    let _span = span("KV cache", 0.0);
    let mapping = mapped(mapping, pool.slots());
    let pool = CubePool::open(pool.clone());
    let gathered = [Kind::Key, Kind::Value].map(|kind| match &pool.scales {
        None => gathered::<FloatPool<gather::X>>(&pool, pool.floats(), &mapping, tokens, kind, dtype),
        Some(scales) => gathered::<Int8Pool>(&pool, pool.codes(scales), &mapping, tokens, kind, dtype),
    });
    gathered.map(Cube::tensor)
}

fn gathered<P: Storage>(
    pool: &CubePool,
    arg: P::RuntimeArg,
    mapping: &CubeTensor,
    tokens: usize,
    kind: Kind,
    dtype: DType,
) -> CubeTensor {
    let [heads, slots, elements] = dims(&pool.keys);
    let out = empty(&pool.keys, [heads, tokens, elements * P::PACK], dtype);
    let grid = Grid::elements([&pool.keys, &out], heads * tokens * elements);
    let types = [if P::SCALED { elem(&out) } else { elem(&pool.keys) }, elem(&out)];
    launch!(gather::<P>, grid, [mapping, &out], arg, tokens, heads, slots, elements, kind, types);
    out
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
    let mut largest = 0u32;
    if writes {
        let mut i = lane;
        while i < dim {
            largest = max(largest, magnitude(f32::cast_from(numbers[from + i])));
            i += units;
        }
    }
    let bits = scale_bits(row_max::<u32>(lanes, largest, units));
    if writes {
        let mut i = lane;
        while i < dim / CODES {
            let mut word = 0i32;
            #[unroll]
            for j in 0..CODES {
                let x = f32::cast_from(numbers[from + i * CODES + j]);
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
    #[comptime] grid: RowGrid,
    #[define(F)] _dtype: ElemType,
) {
    let mut lanes = Shared::<[u32]>::new_slice(UNITS);
    let units = comptime!(grid.units);
    let row = row_index(grid);
    let token = row / kv;
    let writes = token < tokens;
    let slot = row % kv * slots + mapping[min(token, tokens - 1)] as usize;
    let (from, to) = (row * dim, slot * (dim / CODES));
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

/// Reads keys or values in slots of a pool. A unit has an element.
#[cube(launch, address_type = "dynamic")]
pub(super) fn gather<X: Float, F: Float, P: Storage>(
    mapping: &[i32],
    out: &mut [F],
    pool: &P,
    tokens: usize,
    kv: usize,
    slots: usize,
    elements: usize,
    #[comptime] kind: Kind,
    #[define(X, F)] _dtypes: [ElemType; 2],
) {
    let token = ABSOLUTE_POS / elements % tokens;
    let head = ABSOLUTE_POS / (elements * tokens);
    if head < kv {
        let slot = head * slots + mapping[token] as usize;
        let mut numbers = Array::<f32>::new(P::PACK);
        P::load(pool, kind, slot * elements + ABSOLUTE_POS % elements, &mut numbers);
        if P::SCALED {
            let bits = P::scales(pool, slot) >> comptime!(if kind == Kind::Value { 16u32 } else { 0u32 });
            let scale = scale_of(bits);
            #[unroll]
            for j in 0..P::PACK {
                numbers[j] *= scale;
            }
        }
        #[unroll]
        for j in 0..P::PACK {
            out[ABSOLUTE_POS * P::PACK + j] = F::cast_from(numbers[j]);
        }
    }
}
