//! A paged cache of keys and values.

mod attention;
mod cache;

use super::{assert_near, cases, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::KvPool;

const BLOCK: usize = 16;

/// Key heads, query heads of each, dimensions.
#[derive(Clone, Copy, Debug)]
struct Heads {
    kv: usize,
    group: usize,
    dim: usize,
}

/// How a pool stores numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Float,
    Int8,
}

/// The keys' and values' numbers in every slot, `[kv, slots, dim]` each.
type Contents = [Vec<f64>; 2];

fn scale_of(bits: u32) -> f64 {
    f64::from(f32::from_bits(bits << 16))
}

/// The code at a place of a word.
fn code_of(word: i32, place: usize) -> f64 {
    f64::from(word.to_le_bytes()[place] as i8)
}

/// Numbers as they are stored in 8 bits.
fn rounded(x: &[f64]) -> Vec<f64> {
    let largest = x.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let scale = scale_of(((largest as f32 / 127.0).to_bits() + 0xFFFF) >> 16);
    let code = |x: f64| (x / scale).round().clamp(-127.0, 127.0);
    x.iter().map(|&x| if scale > 0.0 { code(x) * scale } else { 0.0 }).collect()
}

fn ints<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

fn int_values<const D: usize>(tensor: Tensor<D, Int>) -> Vec<i32> {
    tensor.try_into_vec_as().expect("reading a tensor")
}

/// A pool of numbers that look random.
fn pool(kind: Kind, heads: Heads, blocks: usize, dtype: DType, device: &Device) -> KvPool {
    let Heads { kv, dim, .. } = heads;
    let slots = blocks * BLOCK;
    match kind {
        Kind::Float => {
            let [keys, values] =
                [35, 36].map(|salt| stored(numbers(kv * slots * dim, salt, 1.0), [kv, slots, dim], dtype, device).0);
            KvPool::Float { keys, values }
        }
        Kind::Int8 => {
            let [keys, values] = [35, 36].map(|salt| {
                let codes = numbers(kv * slots * dim, salt, 127.0);
                let words = codes
                    .chunks(4)
                    .map(|codes| i32::from_le_bytes(std::array::from_fn(|j| codes[j].round() as i8 as u8)));
                ints(words.collect(), [kv, slots, dim / 4], device)
            });
            let of = |x: &f64| ((x.abs() + 0.5) as f32 / 127.0).to_bits() >> 16;
            let scales = numbers(kv * slots, 37, 0.5)
                .iter()
                .zip(&numbers(kv * slots, 38, 0.5))
                .map(|(k, v)| (of(k) | (of(v) << 16)) as i32)
                .collect();
            let scales = ints(scales, [kv, slots], device);
            KvPool::Int8 { keys, values, scales }
        }
    }
}

/// The numbers that a pool stands for.
fn contents(pool: &KvPool) -> Contents {
    match pool.clone() {
        KvPool::Float { keys, values: v } => [values(keys), values(v)],
        KvPool::Int8 { keys, values, scales } => {
            let words = keys.dims()[2];
            let scales = int_values(scales);
            let widened = |tensor, half: u32| {
                let codes = int_values::<3>(tensor);
                let numbers = codes.iter().enumerate().flat_map(|(i, &word)| {
                    let scale = scale_of((scales[i / words] as u32 >> half) & 0xFFFF);
                    (0..4).map(move |j| code_of(word, j) * scale)
                });
                numbers.collect()
            };
            [widened(keys, 0), widened(values, 16)]
        }
    }
}
