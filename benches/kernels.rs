//! The fused kernels of a device: throughput is the bytes that each has to move at least, and `elementwise/copy` is
//! what moving alone reaches.
//!
//! `cargo bench --bench kernels [-- FILTER]` with `FIREBRICK_BENCH_DEVICE=cuda` for another device than the CPU and
//! `FIREBRICK_BENCH_SMALL=1` for a processor or a software driver, whose figures decide nothing. Cases are named
//! `GROUP/KERNEL/TYPE`. A kernel that a device does not use is left out.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/paged.rs"]
mod paged;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;

use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use firebrick::backends::kernels::{
    self, Activation, AdamWBatch, AdamWSlice, AdamWStep, Operation, PackedWeights, QuantizationMap, QuantizedBlocks,
    RowsByToken, SampleOptions, Scaling, ScoreGradients, Truncation, fused,
};
use std::time::{Duration, Instant};

/// Matrices of layers, `[tokens, hidden]`, and of logits, `[rows, vocabulary]`; rows and columns of a cache, of many
/// sequences and of the last few of a step.
#[derive(Clone, Copy)]
struct Sizes {
    layer: [usize; 2],
    logits: [usize; 2],
    cache: [usize; 2],
    last: [usize; 2],
}

/// Key heads of the cache, query heads of each, and dimensions: those of Qwen2.5-1.5B.
const HEADS: [usize; 3] = [2, 6, 128];

const FULL: Sizes = Sizes { layer: [8192, 4096], logits: [256, 151_936], cache: [256, 1024], last: [2, 16_384] };

const SMALL: Sizes = Sizes { layer: [64, 256], logits: [8, 2000], cache: [4, 100], last: [1, 1500] };

/// A device in one type of numbers.
struct Bench {
    device: Device,
    sizes: Sizes,
    name: &'static str,
    dtype: DType,
}

/// One kernel of a group, and the bytes that it has to move.
struct Case<'a> {
    kernel: &'a str,
    bytes: f64,
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion = settings::criterion();
    let (device, info) = settings::device();
    println!("{} ({})", info.name, info.device);
    let types = [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];
    for (name, dtype) in types {
        if !info.dtypes.contains(&name) {
            continue;
        }
        let bench = Bench { device: device.clone(), sizes: if settings::small() { SMALL } else { FULL }, name, dtype };
        bench.elementwise(&mut criterion);
        bench.scores(&mut criterion);
        bench.sampling(&mut criterion);
        bench.paged_attention(&mut criterion);
        bench.embedding(&mut criterion);
        bench.linear(&mut criterion);
        if dtype == DType::F32 {
            bench.optimizer(&mut criterion);
        }
    }
    criterion.final_summary();
}

fn group<'c>(c: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);
    group
}

impl Bench {
    fn normal(&self, shape: [usize; 2]) -> Tensor<2> {
        let values: Tensor<2> = Tensor::random(shape, Distribution::Normal(0.0, 1.0), &self.device);
        values.cast(self.dtype)
    }

    /// Bytes of a matrix in the type of the run.
    fn bytes(&self, [rows, columns]: [usize; 2]) -> f64 {
        (rows * columns * self.dtype.size()) as f64
    }

    /// Measures launches of `launch`, which hands a state from one to the next, until the device has done them all.
    /// Nothing where it gives no state back: the device has no such kernel.
    fn measure<S>(
        &self,
        group: &mut BenchmarkGroup<'_, WallTime>,
        case: &Case<'_>,
        state: S,
        mut launch: impl FnMut(S) -> Option<S>,
    ) {
        // the first launch compiles
        let Some(mut state) = launch(state).map(Some) else {
            return;
        };
        self.device.sync().expect("a device that computes");
        group.throughput(Throughput::Bytes(case.bytes as u64));
        group.bench_function(BenchmarkId::new(case.kernel, self.name), |b| {
            b.iter_custom(|launches| {
                let started = Instant::now();
                for _ in 0..launches {
                    let next = state.take().and_then(&mut launch);
                    state = Some(next.expect("a kernel that the device has"));
                }
                self.device.sync().expect("a device that computes");
                started.elapsed().max(Duration::from_nanos(1))
            });
        });
    }

    fn elementwise(&self, c: &mut Criterion) {
        let mut group = group(c, "elementwise");
        let group = &mut group;
        let shape @ [rows, width] = self.sizes.layer;
        let (x, bytes) = (self.normal(shape), self.bytes(shape));
        let case = |kernel, bytes| Case { kernel, bytes };
        self.measure(group, &case("copy", 2.0 * bytes), x.clone(), |x| Some(x * -1.0));
        let ones = Tensor::<2>::ones([1, width], (&self.device, self.dtype));
        let w = ones.clone();
        self.measure(group, &case("rms_norm", 2.0 * bytes), x.clone(), |x| {
            fused(|| kernels::rms_norm(&x, &w, 1e-6, 0.0)).map(|_| x)
        });
        let leaf = x.clone().autodiff().require_grad();
        let weight = ones.autodiff().require_grad();
        // a backward pass begins with ones, which it writes
        let both = case("rms_norm and gradients", 6.0 * bytes);
        self.measure(group, &both, leaf.clone(), |x| {
            fused(|| kernels::rms_norm(&x, &weight, 1e-6, 0.0))?.backward();
            Some(x)
        });
        let up = self.normal(shape);
        self.measure(group, &case("swiglu", 3.0 * bytes), x.clone(), |x| {
            fused(|| kernels::glu(x.clone(), up.clone(), Activation::Silu)).map(|_| x)
        });
        let up = up.autodiff().require_grad();
        self.measure(group, &case("swiglu and gradients", 9.0 * bytes), leaf, |x| {
            fused(|| kernels::glu(x.clone(), up.clone(), Activation::Silu))?.backward();
            Some(x)
        });
        let half = width / 2;
        let angles = Tensor::<3>::ones([rows, 1, half], (&self.device, DType::F32)) * 0.1;
        let heads = x.reshape([rows, 1, 2 * half]);
        let tables = (2 * 4 * rows * half) as f64;
        self.measure(group, &case("rotary", 2.0 * bytes + tables), heads, |x| {
            fused(|| kernels::rotary(x, &angles, &angles))
        });
    }

    /// Log-probs and entropies of logits, and their gradient.
    fn scores(&self, c: &mut Criterion) {
        let mut group = group(c, "scores");
        let shape @ [rows, vocab] = self.sizes.logits;
        let bytes = self.bytes(shape);
        let targets: Vec<i32> = (0..rows).map(|i| (i * 2377 % vocab) as i32).collect();
        let data = TensorData::new(targets, [rows]);
        let targets = Tensor::<1, Int>::from_data(data, (&self.device, DType::I32));
        let scaling = Scaling { temperature: 1.0, softcap: None };
        let logits = self.normal(shape);
        let forward = Case { kernel: "log-probs and entropies", bytes };
        self.measure(&mut group, &forward, logits.clone(), |logits| {
            fused(|| kernels::score_rows(&logits, &targets, scaling)).map(|_| logits)
        });
        let Some(scores) = fused(|| kernels::score_rows(&logits, &targets, scaling)) else {
            return;
        };
        let d_logp = Tensor::<1>::ones([rows], (&self.device, DType::F32));
        let upstream = ScoreGradients { d_logp: &d_logp, d_entropy: None };
        let backward = Case { kernel: "gradient", bytes: 2.0 * bytes };
        self.measure(&mut group, &backward, logits, |logits| {
            fused(|| kernels::score_gradient(logits, &targets, &scores, upstream, scaling))
        });
    }

    /// One token for every row of logits.
    fn sampling(&self, c: &mut Criterion) {
        let mut group = group(c, "sampling");
        let shape @ [rows, _] = self.sizes.logits;
        let (logits, bytes) = (self.normal(shape), self.bytes(shape));
        let uniforms: Vec<f32> = (0..rows).map(|r| (r as f32 + 0.5) / rows as f32).collect();
        let host = Case { kernel: "all tokens, on the CPU", bytes };
        self.measure(&mut group, &host, logits.clone(), |logits| {
            fused(|| kernels::sample_rows(&logits, 1.0, Some(&uniforms))).map(|_| logits)
        });
        let truncated = Truncation { top_k: Some(50), top_p: 0.95, min_p: 0.0 };
        for (kernel, truncation) in [("all tokens", Truncation::default()), ("top-k and top-p", truncated)] {
            let choice = SampleOptions { temperature: 1.0, truncation, uniforms: Some(&uniforms) };
            self.measure(&mut group, &Case { kernel, bytes }, logits.clone(), |logits| {
                let _ = kernels::samples_on_device(&logits).then(|| kernels::sample_rows_on_device(&logits, choice))?;
                Some(logits)
            });
        }
    }

    /// The sum of rows by token.
    fn embedding(&self, c: &mut Criterion) {
        let shape @ [rows, width] = self.sizes.layer;
        if !kernels::available(Operation::Embedding, &self.device) {
            return;
        }
        let ids: Vec<i32> = (0..rows).map(|i| (i / 2) as i32).collect();
        let segments = RowsByToken::new(&ids, &self.device);
        let sum = Tensor::<2>::zeros([rows, width], (&self.device, self.dtype));
        let added = self.normal(shape);
        // every row is read, and the sum of each token read and written
        let case = Case { kernel: "gradient", bytes: 2.0 * self.bytes(shape) };
        self.measure(&mut group(c, "embedding"), &case, sum, |sum| {
            fused(|| kernels::scatter_add_rows(sum, &segments, &added))
        });
    }

    /// Products of few rows with weights in 8 bits, and with the same weights as they are.
    fn linear(&self, c: &mut Criterion) {
        let shape @ [outputs, inputs] = self.sizes.layer;
        let weights = self.normal(shape);
        let Some(codes) = PackedWeights::quantize(&weights) else {
            return;
        };
        let mut group = group(c, "linear");
        let all = codes.bytes() as f64;
        let quantise = Case { kernel: "weights to 8 bits", bytes: self.bytes(shape) + all };
        self.measure(&mut group, &quantise, (), |()| PackedWeights::quantize(&weights).map(|_| ()));
        for rows in [1, 16, 64, 256] {
            let x = self.normal([rows, inputs]);
            let rest = self.bytes([rows, inputs + outputs]);
            let exact = Case { kernel: &format!("{rows} rows"), bytes: self.bytes(shape) + rest };
            self.measure(&mut group, &exact, (), |()| {
                let _ = x.clone().matmul(weights.clone().transpose());
                Some(())
            });
            let packed = Case { kernel: &format!("{rows} rows in 8 bits"), bytes: all + rest };
            self.measure(&mut group, &packed, (), |()| codes.takes(&x).then(|| drop(codes.linear(&x))));
        }
    }

    /// `AdamW`, and moments to 8 bits and back.
    fn optimizer(&self, c: &mut Criterion) {
        let mut group = group(c, "optimizer");
        let shape @ [rows, _] = self.sizes.layer;
        let step = AdamWStep { clip: 1.0, betas: [0.9, 0.95], eps: 1e-8, second_root: 0.5, rate: 1e-3, keep: 1.0 };
        let bytes = self.bytes(shape);
        let (value, gradient) = (self.normal(shape), self.normal(shape));
        let moments = [self.normal(shape), self.normal(shape).abs()];
        let case = |kernel, bytes| Case { kernel, bytes };
        if kernels::has_adamw(&value) {
            let state = (value.clone(), moments);
            let adamw = case("adamw", 7.0 * bytes);
            self.measure(&mut group, &adamw, state, |(value, moments)| {
                let mut batch = AdamWBatch::default();
                let slices = vec![AdamWSlice { rows: 0..rows, moments: Some(moments) }];
                let mut new = kernels::adamw(value, slices, &gradient, None, &step, &mut batch);
                batch.launch();
                Some((new.value, new.moments.remove(0)))
            });
        }
        let table: Vec<f32> = (0..256).map(|i| i as f32 / 127.5 - 1.0).collect();
        let data = TensorData::new(table, [256]);
        let table = Tensor::<1>::from_data(data, (&self.device, DType::F32));
        let map = QuantizationMap { midpoints: &table, middle: 0.0, smallest: 0.0 };
        let quantise = case("moments to 8 bits", 1.25 * bytes);
        self.measure(&mut group, &quantise, value.clone(), |value| {
            fused(|| kernels::quantize_blockwise(&value, &map)).map(|_| value)
        });
        if let Some(blocks) = fused(|| kernels::quantize_blockwise(&value, &map)) {
            let back = case("moments from 8 bits", 1.25 * bytes);
            self.measure(&mut group, &back, blocks, |blocks: QuantizedBlocks| {
                fused(|| kernels::dequantize_blockwise(&blocks, &table, shape, DType::F32)).map(|_| blocks)
            });
        }
    }
}
