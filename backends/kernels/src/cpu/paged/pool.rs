//! Writing, copying and reading rows of a pool. These compute nothing that a model could compute otherwise, so that
//! they do not ask whether kernels are enabled.

use super::int8::{encode, key_scale, pack_scales, value_scale};
use super::storage::{Kind, key_start};
use crate::cpu::prelude::*;
use crate::paged::{KvPool, SlotMapping};
use burn::tensor::Element;
use firebrick_spec::BLOCK_SIZE;
use half::{bf16, f16};

/// Elements from which heads are copied in parallel.
const LARGE: usize = 1 << 16;

/// Calls a function of one type parameter for the elements of a float type.
macro_rules! dispatch_stored {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F64 => $function::<f64>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            other => unreachable!("a pool in {other:?}"),
        }
    };
}

/// See [`crate::write_kv`].
pub(crate) fn write_kv(pool: KvPool, kv: [&Tensor<3>; 2], slots: &SlotMapping) -> KvPool {
    let (slots, slot_count) = (slots.slots(), pool.slots());
    assert!(slots.iter().all(|&slot| (slot as usize) < slot_count), "a slot outside the pool");
    if slots.is_empty() {
        return pool;
    }
    let rows = |dtype| kv.map(|t| detached(t.clone().cast(dtype)));
    match pool {
        KvPool::Float { keys, values } => {
            let dtype = keys.dtype();
            let [k, v] = rows(dtype);
            let write = |kind, into: Tensor<3>, rows: &FlexTensor| {
                let into = detached(into);
                to_tensor(dispatch_stored!(dtype, write_rows(kind, into, rows, slots)))
            };
            KvPool::Float { keys: write(Kind::Key, keys, &k), values: write(Kind::Value, values, &v) }
        }
        KvPool::Int8 { keys, values, scales } => {
            let mut pool = [detached_int(keys), detached_int(values)];
            let mut scales = detached_int(scales);
            encode_rows(&mut pool, &mut scales, &rows(DType::F32), slots);
            let [keys, values] = pool.map(to_int_tensor);
            KvPool::Int8 { keys, values, scales: to_int_tensor(scales) }
        }
    }
}

/// See [`crate::copy_blocks`].
pub(crate) fn copy_blocks(pool: KvPool, pairs: &[(u32, u32)]) -> KvPool {
    let blocks = pool.slots() / BLOCK_SIZE;
    let inside = |block: u32| (block as usize) < blocks;
    assert!(pairs.iter().all(|&(from, to)| inside(from) && inside(to)), "a block outside the pool");
    if pairs.is_empty() {
        return pool;
    }
    let float = |t: Tensor<3>| {
        let t = detached(t);
        to_tensor(dispatch_stored!(t.dtype(), copy_rows(t, pairs)))
    };
    match pool {
        KvPool::Float { keys, values } => KvPool::Float { keys: float(keys), values: float(values) },
        KvPool::Int8 { keys, values, scales } => {
            let codes = |t| to_int_tensor(copy_rows::<i32>(detached_int(t), pairs));
            KvPool::Int8 {
                keys: codes(keys),
                values: codes(values),
                scales: to_int_tensor(copy_rows::<i32>(detached_int(scales), pairs)),
            }
        }
    }
}

/// See [`crate::gather_kv`].
pub(crate) fn gather_kv(pool: &KvPool, slots: &SlotMapping, dtype: DType) -> [Tensor<3>; 2] {
    let (slots, slot_count) = (slots.slots(), pool.slots());
    assert!(slots.iter().all(|&slot| (slot as usize) < slot_count), "a slot outside the pool");
    match pool {
        KvPool::Float { keys, values } => [(Kind::Key, keys), (Kind::Value, values)].map(|(kind, t)| {
            let t = detached(t.clone());
            let rows = dispatch_stored!(t.dtype(), gather_rows(kind, &t, slots));
            to_tensor::<3>(rows).cast(dtype)
        }),
        KvPool::Int8 { keys, values, scales } => {
            let scales = detached_int(scales.clone());
            let decode = |kind, t: &Tensor<3, _>| {
                let codes = detached_int(t.clone());
                let rows: Tensor<3> = to_tensor(decode_rows(kind, &codes, &scales, slots));
                rows.cast(dtype)
            };
            [decode(Kind::Key, keys), decode(Kind::Value, values)]
        }
    }
}

/// Offset of a slot's key or value in the pool of a head, and the stride of its numbers.
fn place(kind: Kind, slot: u32, dim: usize) -> (usize, usize) {
    match kind {
        Kind::Key => (key_start(slot as usize, dim), BLOCK_SIZE),
        Kind::Value => (slot as usize * dim, 1),
    }
}

/// Writes `rows`, `[tokens, heads, dim]`, to slots of `pool`, `[heads, slots, dim]`.
fn write_rows<E: Element + bytemuck::Pod>(
    kind: Kind,
    mut pool: FlexTensor,
    rows: &FlexTensor,
    slots: &[u32],
) -> FlexTensor {
    let [heads, slot_count, dim] = dims(&pool);
    assert_eq!(dims(rows), [slots.len(), heads, dim], "keys or values");
    let rows: &[E] = elements(rows);
    let write = |head: usize, pool: &mut [E]| {
        for (row, &slot) in rows.chunks_exact(heads * dim).zip(slots) {
            let row = &row[head * dim..][..dim];
            match place(kind, slot, dim) {
                (start, 1) => pool[start..][..dim].copy_from_slice(row),
                (start, step) => {
                    let to = pool[start..].iter_mut().step_by(step);
                    to.zip(row).for_each(|(to, &x)| *to = x);
                }
            }
        }
    };
    by_chunks(elements_mut(&mut pool), slot_count * dim, rows.len() >= LARGE, write);
    pool
}

/// [`write_rows`] in 8 bits.
fn encode_rows([keys, values]: &mut [FlexTensor; 2], scales: &mut FlexTensor, [k, v]: &[FlexTensor; 2], slots: &[u32]) {
    let [heads, slot_count, words] = dims(keys);
    let dim = words * 4;
    assert_eq!(dims(k), [slots.len(), heads, dim], "keys");
    assert_eq!(dims(v), dims::<3>(k), "values");
    let (k, v) = (elements::<f32>(k), elements::<f32>(v));
    let write = |head: usize, keys: &mut [i32], values: &mut [i32], scales: &mut [i32]| {
        let keys: &mut [i8] = bytemuck::cast_slice_mut(keys);
        let values: &mut [i8] = bytemuck::cast_slice_mut(values);
        vectorised!({
            for (token, &slot) in slots.iter().enumerate() {
                let from = (token * heads + head) * dim;
                let to = key_start(slot as usize, dim);
                let key = encode(&k[from..][..dim], |i, code| {
                    keys[to + i * BLOCK_SIZE] = code;
                });
                let to = &mut values[slot as usize * dim..][..dim];
                let value = encode(&v[from..][..dim], |i, code| to[i] = code);
                scales[slot as usize] = pack_scales(key, value);
            }
        });
    };
    let large = k.len() >= LARGE;
    let keys = elements_mut::<i32>(keys);
    let values = elements_mut::<i32>(values);
    let scales = elements_mut::<i32>(scales);
    let size = slot_count * words;
    if large {
        let pools = keys.par_chunks_mut(size).zip(values.par_chunks_mut(size));
        let pools = pools.zip(scales.par_chunks_mut(slot_count)).enumerate();
        pools.for_each(|(head, ((keys, values), scales))| write(head, keys, values, scales));
    } else {
        let pools = keys.chunks_mut(size).zip(values.chunks_mut(size));
        let pools = pools.zip(scales.chunks_mut(slot_count)).enumerate();
        pools.for_each(|(head, ((keys, values), scales))| write(head, keys, values, scales));
    }
}

/// Copies blocks of `pool`, `[heads, slots, …]`, to others.
fn copy_rows<E: Element + bytemuck::Pod>(mut pool: FlexTensor, pairs: &[(u32, u32)]) -> FlexTensor {
    let shape = pool.layout().shape();
    let (heads, width) = (shape[0], shape.num_elements() / shape[0]);
    let block = width / shape[1] * BLOCK_SIZE;
    let copy = |_, pool: &mut [E]| {
        for &(from, to) in pairs {
            let from = from as usize * block;
            pool.copy_within(from..from + block, to as usize * block);
        }
    };
    by_chunks(elements_mut(&mut pool), width, heads * pairs.len() * block >= LARGE, copy);
    pool
}

/// The rows of some slots, `[heads, tokens, dim]`.
fn gather_rows<E: Element + bytemuck::Pod>(kind: Kind, pool: &FlexTensor, slots: &[u32]) -> FlexTensor {
    let [heads, slot_count, dim] = dims(pool);
    let rows: &[E] = elements(pool);
    let mut out = vec![E::zeroed(); heads * slots.len() * dim];
    by_heads(&mut out, heads, |head, out| {
        let rows = &rows[head * slot_count * dim..][..slot_count * dim];
        for (out, &slot) in out.chunks_exact_mut(dim).zip(slots) {
            match place(kind, slot, dim) {
                (start, 1) => out.copy_from_slice(&rows[start..][..dim]),
                (start, step) => {
                    let from = rows[start..].iter().step_by(step);
                    out.iter_mut().zip(from).for_each(|(out, &x)| *out = x);
                }
            }
        }
    });
    tensor(out, [heads, slots.len(), dim])
}

/// [`gather_rows`] of a pool in 8 bits, in f32.
fn decode_rows(kind: Kind, pool: &FlexTensor, scales: &FlexTensor, slots: &[u32]) -> FlexTensor {
    let scale = match kind {
        Kind::Key => key_scale,
        Kind::Value => value_scale,
    };
    let [heads, slot_count, words] = dims(pool);
    let dim = words * 4;
    let rows: &[i8] = bytemuck::cast_slice(elements::<i32>(pool));
    let scales = elements::<i32>(scales);
    let mut out = vec![0.0_f32; heads * slots.len() * dim];
    by_heads(&mut out, heads, |head, out| {
        let rows = &rows[head * slot_count * dim..][..slot_count * dim];
        let scales = &scales[head * slot_count..][..slot_count];
        for (out, &slot) in out.chunks_exact_mut(dim).zip(slots) {
            let scale = scale(scales[slot as usize]);
            let (start, step) = place(kind, slot, dim);
            let codes = rows[start..].iter().step_by(step);
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = f32::from(code) * scale;
            }
        }
    });
    tensor(out, [heads, slots.len(), dim])
}

/// `body(head, out)` for the numbers of each head, in parallel unless they are few.
fn by_heads<E: Send>(out: &mut [E], heads: usize, body: impl Fn(usize, &mut [E]) + Sync + Send) {
    let (size, large) = ((out.len() / heads).max(1), out.len() >= LARGE);
    by_chunks(out, size, large, body);
}
