//! Slots that are written, read and copied.

use super::{BLOCK, Heads, Kind, assert_near, contents, numbers, on_gpus, pool, precisions, rounded, stored, values};
use burn::tensor::{DType, Device};
use firebrick_backends::kernels::{self, KvPool, SlotMapping};

on_gpus!(
    what_is_written_to_slots_is_read_from_them_and_copied_with_their_blocks,
    numbers_that_are_not_finite_stay_so_in_eight_bits,
);

fn what_is_written_to_slots_is_read_from_them_and_copied_with_their_blocks(device: &Device) {
    for (dtype, _) in precisions(device) {
        for kind in [Kind::Float, Kind::Int8] {
            let heads = Heads { kv: 3, group: 1, dim: 36 };
            let (blocks, slots) = (7, [19, 18, 100, 33, 0, 111, 17]);
            let what = format!("{kind:?} in {dtype:?}");
            let shape = [slots.len(), heads.kv, heads.dim];
            let [(k, ks), (v, vs)] = [41, 42].map(|salt| {
                let mut numbers = numbers(shape.iter().product(), salt, 3.0);
                // a key or value of zeros
                numbers[heads.dim..][..heads.dim].fill(0.0);
                stored(numbers, shape, dtype, device)
            });
            let pool = pool(kind, heads, blocks, dtype, device);
            let before = contents(&pool);
            let mapping = SlotMapping::new(slots.to_vec(), device);
            let written = kernels::write_kv(pool.clone(), [&k, &v], &mapping);
            let after = contents(&written);
            let mut expected = before.clone();
            for (half, own) in [ks, vs].iter().enumerate() {
                for (i, own) in own.chunks(heads.dim).enumerate() {
                    let (token, head) = (i / heads.kv, i % heads.kv);
                    let own = match kind {
                        Kind::Float => own.to_vec(),
                        Kind::Int8 => rounded(own),
                    };
                    let at = (head * blocks * BLOCK + slots[token] as usize) * heads.dim;
                    expected[half][at..][..heads.dim].copy_from_slice(&own);
                }
            }
            for half in 0..2 {
                assert_near(&what, &after[half], &expected[half], 1e-3);
                let changed =
                    (0..before[half].len()).filter(|&i| after[half][i].to_bits() != before[half][i].to_bits());
                let most = slots.len() * heads.kv * heads.dim;
                assert!(changed.count() <= most, "{what}: other slots");
            }
            assert_eq!(contents(&pool), before, "{what}: a pool that others hold");

            let read = kernels::gather_kv(&written, &mapping, DType::F32);
            for (found, after) in read.into_iter().zip(&after) {
                assert_eq!(found.dims(), [heads.kv, slots.len(), heads.dim]);
                let expected: Vec<f64> = (0..heads.kv * slots.len())
                    .flat_map(|i| {
                        let slot = slots[i % slots.len()] as usize;
                        let first = (i / slots.len() * blocks * BLOCK + slot) * heads.dim;
                        after[first..][..heads.dim].to_vec()
                    })
                    .collect();
                assert_near(&format!("{what}: read"), &values(found), &expected, 1e-6);
            }

            let copied = contents(&kernels::copy_blocks(written, &[(1, 5), (6, 2)]));
            for (found, after) in copied.iter().zip(&after) {
                let mut expected = after.clone();
                let block = BLOCK * heads.dim;
                for head in 0..heads.kv {
                    for (from, to) in [(1, 5), (6, 2)] {
                        let at = |b: usize| (head * blocks + b) * block;
                        expected.copy_within(at(from)..at(from) + block, at(to));
                    }
                }
                assert_eq!(*found, expected, "{what}: copied");
            }
        }
    }
}

fn numbers_that_are_not_finite_stay_so_in_eight_bits(device: &Device) {
    let dim = 12;
    let mut keys = numbers(3 * dim, 43, 1.0);
    keys[3] = f64::NAN;
    keys[dim + 5] = f64::NEG_INFINITY;
    let (keys, _) = stored(keys, [3, 1, dim], DType::F32, device);
    let (finite, _) = stored(numbers(3 * dim, 44, 1.0), [3, 1, dim], DType::F32, device);
    let slots = SlotMapping::new(vec![4, 9, 2], device);
    let pool = KvPool::int8(1, 1, dim, device);
    let pool = kernels::write_kv(pool, [&keys, &finite], &slots);
    let [keys, values_of] = kernels::gather_kv(&pool, &slots, DType::F32);
    let keys = values(keys);
    assert!(keys[..2 * dim].iter().all(|x| x.is_nan()));
    assert!(keys[2 * dim..].iter().all(|x| x.is_finite()));
    assert!(values(values_of).iter().all(|x| x.is_finite()));
}
