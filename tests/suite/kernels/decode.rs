//! Attention of one new token a sequence over a cache.

use super::{assert_near, cases, numbers, on_gpus, precisions, stored, values};
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::kernels::{self, DecodeShape, Decoded, Kin};
use firebrick_backends::memory::read;
use std::ops::Range;

on_gpus!(
    decoding_writes_the_new_column_and_reads_live_ones_alone,
    a_cube_has_some_of_many_query_heads_and_a_unit_several_of_many_dimensions,
    the_columns_of_a_few_long_rows_are_divided_among_cubes,
    a_cache_that_nobody_else_holds_is_written_where_it_is,
);

/// Rows, key heads, query heads of each, dimensions, columns.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    kv: usize,
    group: usize,
    dim: usize,
    columns: usize,
}

/// What the step has of every row: as the device stores it, and as numbers.
struct Step {
    sizes: Sizes,
    tensors: [Tensor<2>; 3],
    numbers: [Vec<f64>; 3],
    angles: [Tensor<3>; 2],
    turns: [Vec<f64>; 2],
    cache: [Tensor<4>; 2],
    cached: [Vec<f64>; 2],
    dtype: DType,
    device: Device,
}

impl Step {
    fn new(sizes: Sizes, dtype: DType, device: &Device) -> Self {
        let Sizes {
            rows,
            kv,
            group,
            dim,
            columns,
        } = sizes;
        let own = |heads: usize, salt| {
            let n = rows * heads * dim;
            stored(numbers(n, salt, 1.5), [rows, heads * dim], dtype, device)
        };
        let ((q, qs), (k, ks), (v, vs)) = (own(kv * group, 31), own(kv, 32), own(kv, 33));
        let angles = numbers(rows * dim / 2, 34, 3.0);
        let turn = |f: fn(f64) -> f64| {
            let turned = angles.iter().map(|&a| f(a)).collect();
            stored(turned, [rows, 1, dim / 2], DType::F32, device)
        };
        let ((cos, cosines), (sin, sines)) = (turn(f64::cos), turn(f64::sin));
        // a row more than there are sequences
        let shape = [rows + 1, kv, columns, dim];
        let cached = |salt| {
            stored(
                numbers(shape.iter().product(), salt, 1.0),
                shape,
                dtype,
                device,
            )
        };
        let ((keys, keys_in), (values, values_in)) = (cached(35), cached(36));
        Self {
            sizes,
            tensors: [q, k, v],
            numbers: [qs, ks, vs],
            angles: [cos, sin],
            turns: [cosines, sines],
            cache: [keys, values],
            cached: [keys_in, values_in],
            dtype,
            device: device.clone(),
        }
    }

    /// A head of a row, turned and rounded as it is stored.
    fn turned(&self, x: &[f64], row: usize) -> Vec<f64> {
        let half = self.sizes.dim / 2;
        let mut turned = vec![0.0; 2 * half];
        for i in 0..half {
            let [c, s] = self.turns.each_ref().map(|t| t[row * half + i]);
            turned[i] = x[i] * c - x[i + half] * s;
            turned[i + half] = x[i + half] * c + x[i] * s;
        }
        stored(turned, [2 * half], self.dtype, &self.device).1
    }

    /// Mixed values, and the cache afterwards; `live` are the columns of each row with the new one last.
    fn expected(
        &self,
        live: &[Range<usize>],
        window: Option<usize>,
        scale: f64,
        softcap: Option<f64>,
    ) -> (Vec<f64>, [Vec<f64>; 2]) {
        let Sizes {
            rows,
            kv,
            group,
            dim,
            columns,
        } = self.sizes;
        let [qs, ks, vs] = &self.numbers;
        let [mut keys, mut values] = self.cached.clone();
        let mut mixed = vec![0.0; rows * kv * group * dim];
        let head_of = |x: &[f64], head: usize| x[head * dim..][..dim].to_vec();
        for (row, live) in live.iter().enumerate().filter(|(_, live)| !live.is_empty()) {
            let seen = live.end - window.unwrap_or(columns).min(live.len())..live.end;
            for head in 0..kv {
                let slab = (row * kv + head) * columns;
                let at = |c: usize| (slab + c) * dim..(slab + c + 1) * dim;
                let new = at(live.end - 1);
                keys[new.clone()].copy_from_slice(&self.turned(&head_of(ks, row * kv + head), row));
                values[new].copy_from_slice(&head_of(vs, row * kv + head));
                for h in 0..group {
                    let place = row * kv * group + head * group + h;
                    let q = self.turned(&head_of(qs, place), row);
                    let score = |c: usize| {
                        let products = q.iter().zip(&keys[at(c)]).map(|(a, b)| a * b);
                        let s = products.sum::<f64>() * scale;
                        softcap.map_or(s, |cap| cap * (s / cap).tanh())
                    };
                    let weights: Vec<f64> = seen.clone().map(|c| score(c).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for (c, w) in seen.clone().zip(weights) {
                        for (d, v) in values[at(c)].iter().enumerate() {
                            mixed[place * dim + d] += w / total * v;
                        }
                    }
                }
            }
        }
        (mixed, [keys, values])
    }
}

/// Columns of each row: the first is in no sequence, the second has its new column alone, the last has all that there are.
fn live(sizes: Sizes) -> Vec<Range<usize>> {
    let end = sizes.columns - sizes.columns.min(3) / 2;
    (0..sizes.rows)
        .map(|row| match row {
            0 if sizes.rows > 1 => 0..0,
            1 => end - 1..end,
            row if row + 1 == sizes.rows => 0..end,
            row => (row * 7) % end..end,
        })
        .collect()
}

fn hold(
    sizes: Sizes,
    window: Option<usize>,
    softcap: Option<f64>,
    (dtype, tolerance): (DType, f64),
    device: &Device,
) {
    let step = Step::new(sizes, dtype, device);
    let live = live(sizes);
    // two that share a beginning where there is one, the others by themselves
    let kin = live
        .iter()
        .cloned()
        .enumerate()
        .filter(|(_, own)| !own.is_empty());
    let kin = kin.map(|(row, own)| {
        let shared = (own.len() - 1).min(row);
        Kin {
            prefix: (row, own.start..own.start + shared),
            members: vec![(row, own.start + shared..own.end)],
        }
    });
    let decoded = Decoded::new(kin.collect(), sizes.rows, device);
    let [cos, sin] = &step.angles;
    let shape = DecodeShape {
        decoded: &decoded,
        angles: [cos, sin],
        window,
        scale: 0.4,
        softcap,
    };
    let before = step.cache.clone();
    let (mixed, cache) =
        kernels::decode_attention(step.tensors.clone(), before, &shape).expect("a kernel");
    let (expected, cached) = step.expected(&live, window, 0.4, softcap);
    let what = format!("{sizes:?} in {dtype:?}, window {window:?}, cap {softcap:?}");
    assert_near(&what, &values(mixed), &expected, tolerance);
    for (found, expected) in cache.into_iter().zip(&cached) {
        assert_near(
            &format!("{what}: the cache"),
            &values(found),
            expected,
            tolerance,
        );
    }
    let [q, ..] = &step.tensors;
    assert_near(
        "queries that others hold",
        &values(q.clone()),
        &step.numbers[0],
        0.0,
    );
    for (held, before) in step.cache.iter().zip(&step.cached) {
        assert_near(
            "a cache that others hold",
            &values(held.clone()),
            before,
            0.0,
        );
    }
}

fn decoding_writes_the_new_column_and_reads_live_ones_alone(device: &Device) {
    for precision in precisions(device) {
        for softcap in [None, Some(2.0)] {
            for (group, dim) in [(1, 34), (3, 10)] {
                let sizes = (1_usize..6, 1_usize..4, 1_usize..90, 0_usize..60);
                cases(sizes, |(rows, kv, columns, window)| {
                    let sizes = Sizes {
                        rows,
                        kv,
                        group,
                        dim,
                        columns,
                    };
                    let window = Some(window).filter(|&w| w > 0);
                    hold(sizes, window, softcap, precision, device);
                });
            }
        }
    }
}

fn a_cube_has_some_of_many_query_heads_and_a_unit_several_of_many_dimensions(device: &Device) {
    for (group, dim) in [(11, 6), (5, 300), (7, 128)] {
        let sizes = Sizes {
            rows: 3,
            kv: 2,
            group,
            dim,
            columns: 211,
        };
        hold(sizes, None, None, (DType::F32, 1e-5), device);
        hold(sizes, Some(70), None, (DType::F32, 1e-5), device);
    }
}

fn the_columns_of_a_few_long_rows_are_divided_among_cubes(device: &Device) {
    for precision in precisions(device) {
        for (group, dim) in [(2, 128), (9, 34)] {
            // the new column is the last but one
            for (rows, columns) in [(1, 1024), (1, 1025), (3, 1500)] {
                let sizes = Sizes {
                    rows,
                    kv: 2,
                    group,
                    dim,
                    columns,
                };
                hold(sizes, None, None, precision, device);
                hold(sizes, Some(1111), Some(2.0), precision, device);
            }
        }
    }
}

/// Bytes by which the pools grow while a few tokens are decoded.
fn grown(sizes: Sizes, device: &Device) -> u64 {
    let step = Step::new(sizes, DType::F32, device);
    let kin = (0..sizes.rows).map(|row| Kin {
        prefix: (row, 0..0),
        members: vec![(row, 0..40)],
    });
    let decoded = Decoded::new(kin.collect(), sizes.rows, device);
    let [cos, sin] = &step.angles;
    let shape = DecodeShape {
        decoded: &decoded,
        angles: [cos, sin],
        window: None,
        scale: 1.0,
        softcap: None,
    };
    let mut cache = step.cache;
    let before = read(device).reserved_bytes;
    for _ in 0..3 {
        let qkv = step.tensors.clone();
        let (_, written) = kernels::decode_attention(qkv, cache, &shape).expect("a kernel");
        cache = written;
    }
    read(device).reserved_bytes - before
}

fn a_cache_that_nobody_else_holds_is_written_where_it_is(device: &Device) {
    let sizes = Sizes {
        rows: 3,
        kv: 2,
        group: 2,
        dim: 64,
        columns: 4000,
    };
    // a thread has pools of its own
    let grown = std::thread::scope(|scope| scope.spawn(|| grown(sizes, device)).join());
    let cache = ((sizes.rows + 1) * sizes.kv * sizes.columns * sizes.dim * 4) as u64;
    assert!(grown.expect("a thread that ends well") < cache / 2);
}
