//! Writing, copying and reading rows of a pool, in every type.

use super::numbers;
use crate::cpu::autodiff::{detached, detached_int};
use crate::{KvPool, SlotMapping, copy_blocks, gather_kv, write_kv};
use burn::tensor::{DType, Device, Tensor};
use firebrick_spec::BLOCK_SIZE;

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// Key heads, blocks, and numbers of a head.
const SIZE: [usize; 3] = [3, 6, 20];

/// Pools of zeros in every type; `None` is 8 bits.
fn pools() -> Vec<(Option<DType>, KvPool)> {
    let ([heads, blocks, dim], device) = (SIZE, Device::flex());
    let float = |dtype| {
        let pool = KvPool::float(heads, blocks, dim, dtype, &device);
        (Some(dtype), pool)
    };
    let codes = (None, KvPool::int8(heads, blocks, dim, &device));
    FLOATS.into_iter().map(float).chain([codes]).collect()
}

fn mapping(slots: &[u32]) -> SlotMapping {
    SlotMapping::new(slots.to_vec(), &Device::flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// Everything in a pool, keys before values.
pub(super) fn contents(pool: &KvPool) -> [Vec<f64>; 2] {
    let slots: Vec<u32> = (0..pool.slots() as u32).collect();
    gather_kv(pool, &mapping(&slots), DType::F64).map(values)
}

/// Addresses of a pool's keys and values.
pub(super) fn addresses(pool: &KvPool) -> [usize; 2] {
    let float = |t: &Tensor<3>| detached(t.clone()).bytes().as_ptr() as usize;
    match pool {
        KvPool::Float { keys, values } => [keys, values].map(float),
        KvPool::Int8 { keys, values, .. } => [keys, values].map(|t| detached_int(t.clone()).bytes().as_ptr() as usize),
    }
}

/// Keys and values of some tokens, `[tokens, heads, dim]`: views that are not contiguous.
fn rows(tokens: usize, dtype: DType) -> [Tensor<3>; 2] {
    let [heads, _, dim] = SIZE;
    [31, 32].map(|salt| {
        let wide = numbers([heads, tokens, 3 * dim], salt) * 4.0;
        wide.cast(dtype).swap_dims(0, 1).narrow(2, dim, dim)
    })
}

#[test]
fn rows_are_read_as_they_were_written_and_others_stay() {
    let slots = [17, 3, 95, 18, 64];
    for (dtype, pool) in pools() {
        for from in FLOATS.into_iter().filter(|&f| dtype.is_none_or(|d| d == f)) {
            let [k, v] = rows(slots.len(), from);
            let written = write_kv(pool.clone(), [&k, &v], &mapping(&slots));
            let read = gather_kv(&written, &mapping(&slots), from);
            let to = if dtype.is_none() { DType::F32 } else { from };
            for (read, row) in read.into_iter().zip([k, v]) {
                assert_eq!(read.dtype(), from);
                let expected = match dtype {
                    Some(_) => values(row.swap_dims(0, 1)),
                    None => rounded(row.cast(to).swap_dims(0, 1), from),
                };
                assert_eq!(values(read), expected, "{dtype:?} from {from:?}");
            }
            let [heads, _, dim] = SIZE;
            for values in contents(&written) {
                for (i, row) in values.chunks(dim).enumerate() {
                    let slot = (i % written.slots()) as u32;
                    let zeros = row.iter().all(|&x| x == 0.0);
                    assert_eq!(zeros, !slots.contains(&slot), "slot {slot} of {heads}");
                }
            }
        }
    }
}

/// Numbers rounded to 8 bits, head by head, and then to a type; no more than half a scale from what they were.
fn rounded(numbers: Tensor<3>, dtype: DType) -> Vec<f64> {
    let dims = numbers.dims();
    let mut decoded: Vec<f32> = numbers.into_data().iter::<f32>().collect();
    for row in decoded.chunks_mut(dims[2]) {
        let most = row.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        let scale = f32::from_bits(((most / 127.0).to_bits() + 0xFFFF) & 0xFFFF_0000);
        assert!(scale * 127.0 >= most && scale * 127.0 <= most * (1.0 + 1.0 / 128.0));
        for x in row {
            let near = (*x / scale).round_ties_even() * scale;
            assert!((near - *x).abs() <= scale * 0.500_001);
            *x = near;
        }
    }
    let data = burn::tensor::TensorData::new(decoded, dims);
    values(Tensor::<3>::from_data(data, &Device::flex()).cast(dtype))
}

#[test]
fn many_rows_are_written_and_read_in_parallel() {
    let device = Device::flex();
    let (heads, blocks, dim) = (4, 200, 64);
    let slots: Vec<u32> = (0..1000).map(|i| i * 37 % (blocks * 16)).collect();
    let [k, v] = [33, 34].map(|salt| numbers([slots.len(), heads, dim], salt));
    for (pool, bound) in [
        (KvPool::float(heads, 200, dim, DType::F32, &device), 0.0),
        (KvPool::int8(heads, 200, dim, &device), 1.0 / 250.0),
    ] {
        let pool = write_kv(pool, [&k, &v], &mapping(&slots));
        let read = gather_kv(&pool, &mapping(&slots), DType::F32);
        for (read, row) in read.into_iter().zip([&k, &v]) {
            let apart = read - row.clone().swap_dims(0, 1);
            let apart = values(apart.abs().max());
            assert!(apart[0] <= bound, "{apart:?}");
        }
    }
}

#[test]
fn blocks_are_copied_whole_and_others_stay() {
    let block = BLOCK_SIZE as u32;
    let slots: Vec<u32> = (0..2 * block).collect();
    for (dtype, pool) in pools() {
        let [k, v] = rows(slots.len(), dtype.unwrap_or(DType::F32));
        let pool = write_kv(pool, [&k, &v], &mapping(&slots));
        let before = contents(&pool);
        let after = contents(&copy_blocks(pool.clone(), &[(1, 5), (0, 3), (1, 2)]));
        let source = [0, 1, 1, 0, 4, 1];
        let [heads, blocks, dim] = SIZE;
        for (before, after) in before.iter().zip(&after) {
            for head in 0..heads {
                for (to, from) in source.into_iter().enumerate() {
                    let of = |values: &[f64], block: usize| {
                        let first = (head * blocks + block) * BLOCK_SIZE * dim;
                        values[first..first + BLOCK_SIZE * dim].to_vec()
                    };
                    assert_eq!(of(after, to), of(before, from), "{dtype:?}, block {to}");
                }
            }
        }
    }
}

#[test]
fn a_pool_is_written_in_place_unless_it_is_shared() {
    for (dtype, pool) in pools() {
        let place = addresses(&pool);
        let [k, v] = rows(2, dtype.unwrap_or(DType::F32));
        let pool = write_kv(pool, [&k, &v], &mapping(&[1, 40]));
        let pool = copy_blocks(pool, &[(0, 1)]);
        assert_eq!(addresses(&pool), place, "{dtype:?}");
        let (shared, before) = (pool.clone(), contents(&pool));
        let pool = write_kv(pool, [&v, &k], &mapping(&[1, 40]));
        let pool = copy_blocks(pool, &[(2, 0)]);
        assert_ne!(contents(&pool), before);
        assert_eq!(contents(&shared), before, "{dtype:?}");
        assert_eq!(addresses(&shared), place);
    }
}

#[test]
fn what_is_not_finite_stays_so_in_8_bits() {
    let [heads, _, dim] = SIZE;
    let Some((_, pool)) = pools().pop() else {
        unreachable!("the last is in 8 bits");
    };
    let k = numbers([2, heads, dim], 1);
    let bad = k.clone().slice_assign([0..1, 1..2, 3..4], k.clone().slice([0..1, 1..2, 3..4]) / 0.0);
    let pool = write_kv(pool, [&k, &bad], &mapping(&[4, 5]));
    let [keys, read] = gather_kv(&pool, &mapping(&[4, 5]), DType::F32).map(values);
    assert!(keys.iter().all(|x| x.is_finite()));
    for (i, row) in read.chunks(dim).enumerate() {
        // head 1 of the first token
        assert_eq!(row.iter().all(|x| x.is_nan()), i == 2, "row {i}");
        assert_eq!(row.iter().any(|x| x.is_nan()), i == 2, "row {i}");
    }
}

#[test]
#[should_panic(expected = "outside the pool")]
fn a_slot_outside_the_pool_panics() {
    let Some((_, pool)) = pools().pop() else {
        unreachable!("there are pools");
    };
    let [k, v] = rows(1, DType::F32);
    let _ = write_kv(pool, [&k, &v], &mapping(&[96]));
}

#[test]
#[should_panic(expected = "outside the pool")]
fn a_block_outside_the_pool_panics() {
    let Some((_, pool)) = pools().pop() else {
        unreachable!("there are pools");
    };
    let _ = copy_blocks(pool, &[(1, 6)]);
}
