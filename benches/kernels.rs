//! Fused kernels of a device: the bytes that each has to move at least, over the time it takes, beside what a copy of the same
//! numbers reaches.
//!
//! `cargo bench --bench kernels -- --device cuda [--json FILE]`; `--small` for a processor or a software driver. A kernel that a
//! device does not use is left out. Figures of a software driver decide nothing.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[allow(dead_code, reason = "each bench uses its own part")]
mod support;

use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};
use firebrick::backends::kernels::{
    self, AdamWStep, DecodeShape, Decoded, Gate, Kin, Operation, PackedWeights, QuantizationMap,
    QuantizedBlocks, RowsByToken, SampleOptions, Scaling, ScoreGradients, Truncation,
};
use serde_json::json;
use std::time::Instant;
use support::Options;

/// Timed runs, of which the median counts; one before them compiles.
const RUNS: usize = 7;

/// Launches of a run.
const LAUNCHES: usize = 4;

/// Matrices of layers, `[tokens, hidden]`, and of logits, `[rows, vocabulary]`; rows and columns of a cache, of many sequences and of
/// the last few.
#[derive(Clone, Copy)]
struct Sizes {
    layer: [usize; 2],
    logits: [usize; 2],
    cache: [usize; 2],
    last: [usize; 2],
}

/// Key heads of the cache, query heads of each, and dimensions: those of Qwen2.5-1.5B.
const HEADS: [usize; 3] = [2, 6, 128];

const FULL: Sizes = Sizes {
    layer: [8192, 4096],
    logits: [256, 151_936],
    cache: [256, 1024],
    last: [2, 16_384],
};

const LITTLE: Sizes = Sizes {
    layer: [64, 256],
    logits: [8, 2000],
    cache: [4, 100],
    last: [1, 1500],
};

struct Bench {
    device: Device,
    options: Options,
    sizes: Sizes,
    dtype: (&'static str, DType),
    /// Bytes a second of a copy in this type.
    copy: f64,
}

fn main() {
    let options = Options::parse(&[]);
    let (device, info) = options.open();
    println!("{} ({})", info.name, info.device);
    let mut bench = Bench {
        sizes: if options.small { LITTLE } else { FULL },
        dtype: ("f32", DType::F32),
        copy: f64::NAN,
        device,
        options,
    };
    bench.options.write(&json!({
        "case": "device", "device": info.device.to_string(), "name": info.name, "software": info.software
    }));
    let types = [
        ("f32", DType::F32),
        ("bf16", DType::BF16),
        ("f16", DType::F16),
    ];
    for dtype in types {
        if info.dtypes.contains(&dtype.0) {
            bench.dtype = dtype;
            bench.layers();
            bench.scores();
            bench.draws();
            bench.decode("attention over a cache", bench.sizes.cache);
            bench.decode("… of a few long sequences", bench.sizes.last);
            bench.embedding();
            bench.quantised();
        }
    }
    bench.dtype = types[0];
    bench.update();
}

impl Bench {
    fn numbers(&self, shape: [usize; 2]) -> Tensor<2> {
        let values: Tensor<2> = Tensor::random(shape, Distribution::Normal(0.0, 1.0), &self.device);
        values.cast(self.dtype.1)
    }

    /// Bytes of a matrix in the type of the run.
    fn bytes(&self, [rows, columns]: [usize; 2]) -> f64 {
        (rows * columns * self.dtype.1.size()) as f64
    }

    /// Times `work`, which moves some bytes, on a state that goes from launch to launch; nothing where it gives none back: the
    /// device uses no such kernel. The bytes a second.
    fn time<S>(
        &mut self,
        kernel: &str,
        bytes: f64,
        state: S,
        mut work: impl FnMut(S) -> Option<S>,
    ) -> Option<f64> {
        let mut state = Some(state);
        let mut seconds: Vec<f64> = Vec::new();
        for run in 0..=RUNS {
            let started = Instant::now();
            for _ in 0..LAUNCHES {
                state = Some(work(state?)?);
            }
            self.device.sync().expect("a device that computes");
            if run > 0 {
                seconds.push(started.elapsed().as_secs_f64() / LAUNCHES as f64);
            }
        }
        seconds.sort_by(f64::total_cmp);
        let median = seconds[RUNS / 2];
        let rate = bytes / median;
        let of_copy = if self.copy.is_nan() {
            1.0
        } else {
            rate / self.copy
        };
        println!(
            "{kernel:<36} {:<5} {:>9.3} ms {:>8.2} GB/s {:>5.0} % of a copy",
            self.dtype.0,
            median * 1e3,
            rate / 1e9,
            100.0 * of_copy
        );
        self.options.write(&json!({
            "kernel": kernel, "dtype": self.dtype.0, "bytes": bytes, "seconds": median, "of_copy": of_copy
        }));
        Some(rate)
    }

    fn layers(&mut self) {
        let shape @ [rows, width] = self.sizes.layer;
        let (x, bytes) = (self.numbers(shape), self.bytes(shape));
        self.copy = f64::NAN;
        let rate = self.time("copy", 2.0 * bytes, x.clone(), |x| Some(x * 2.0));
        self.copy = rate.unwrap_or(f64::NAN);
        let ones = Tensor::<2>::ones([1, width], (&self.device, self.dtype.1));
        let w = ones.clone();
        self.time("norm", 2.0 * bytes, x.clone(), |x| {
            kernels::rms_norm(&x, &w, 1e-6, 0.0).map(|_| x)
        });
        let leaf = x.clone().autodiff().require_grad();
        let weight = ones.autodiff().require_grad();
        // a backward pass begins with ones, which it writes
        self.time("norm and its gradients", 6.0 * bytes, leaf.clone(), |x| {
            kernels::rms_norm(&x, &weight, 1e-6, 0.0)?.backward();
            Some(x)
        });
        let up = self.numbers(shape);
        self.time("gate", 3.0 * bytes, x.clone(), |x| {
            kernels::glu(Gate::Silu, &x, &up).map(|_| x)
        });
        let up = up.autodiff().require_grad();
        self.time("gate and its gradients", 9.0 * bytes, leaf, |x| {
            kernels::glu(Gate::Silu, &x, &up)?.backward();
            Some(x)
        });
        let half = width / 2;
        let angles = Tensor::<3>::ones([rows, 1, half], (&self.device, DType::F32)) * 0.1;
        let heads = x.reshape([rows, 1, 2 * half]);
        let read = (2 * 4 * rows * half) as f64;
        self.time("rotary", 2.0 * bytes + read, heads, |x| {
            kernels::rotary(x, &angles, &angles).ok()
        });
    }

    fn scores(&mut self) {
        let shape @ [rows, vocab] = self.sizes.logits;
        let bytes = self.bytes(shape);
        let targets: Vec<i32> = (0..rows).map(|i| (i * 2377 % vocab) as i32).collect();
        let data = TensorData::new(targets, [rows]);
        let targets = Tensor::<1, Int>::from_data(data, (&self.device, DType::I32));
        let scaling = Scaling {
            temperature: 1.0,
            softcap: None,
        };
        let logits = self.numbers(shape);
        self.time("scores", bytes, logits.clone(), |logits| {
            kernels::score_rows(&logits, &targets, scaling).map(|_| logits)
        });
        let Some(scores) = kernels::score_rows(&logits, &targets, scaling) else {
            return;
        };
        let d_logp = Tensor::<1>::ones([rows], (&self.device, DType::F32));
        let upstream = ScoreGradients {
            d_logp: &d_logp,
            d_entropy: None,
        };
        self.time("scores' gradient", 2.0 * bytes, logits, |logits| {
            kernels::score_gradient(logits, &targets, &scores, upstream, scaling)
        });
    }

    fn draws(&mut self) {
        let shape @ [rows, _] = self.sizes.logits;
        let (logits, bytes) = (self.numbers(shape), self.bytes(shape));
        let uniforms: Vec<f32> = (0..rows).map(|r| r as f32 / rows as f32).collect();
        self.time("draw, on the CPU", bytes, logits.clone(), |logits| {
            kernels::sample_rows(&logits, 1.0, Some(&uniforms)).map(|_| logits)
        });
        let truncated = Truncation {
            top_k: Some(50),
            top_p: 0.95,
            min_p: 0.0,
        };
        for (kernel, truncation) in [
            ("draw", Truncation::default()),
            ("draw by top-k and top-p", truncated),
        ] {
            let choice = SampleOptions {
                temperature: 1.0,
                truncation,
                uniforms: Some(&uniforms),
            };
            self.time(kernel, bytes, logits.clone(), |logits| {
                kernels::sample_rows_on_device(&logits, choice).map(|_| logits)
            });
        }
    }

    fn decode(&mut self, kernel: &str, [rows, columns]: [usize; 2]) {
        if !kernels::available(Operation::DecodeAttention, &self.device) {
            return;
        }
        let [kv, group, dim] = HEADS;
        let qkv = [kv * group, kv, kv].map(|heads| self.numbers([rows, heads * dim]));
        let cache = [(); 2].map(|()| {
            let numbers = self.numbers([rows * kv * columns, dim]);
            numbers.reshape([rows, kv, columns, dim])
        });
        let angles = Tensor::<3>::ones([rows, 1, dim / 2], (&self.device, DType::F32)) * 0.1;
        let kin = (0..rows).map(|row| Kin {
            prefix: (row, 0..0),
            members: vec![(row, 0..columns)],
        });
        let decoded = Decoded::new(kin.collect(), rows, &self.device);
        let shape = DecodeShape {
            decoded: &decoded,
            angles: [&angles, &angles],
            window: None,
            scale: (dim as f64).sqrt().recip(),
            softcap: None,
        };
        let bytes = 2.0 * self.bytes([rows * kv * columns, dim]);
        self.time(kernel, bytes, cache, |cache| {
            kernels::decode_attention(qkv.clone(), cache, &shape).map(|(_, cache)| cache)
        });
    }

    fn embedding(&mut self) {
        let shape @ [rows, width] = self.sizes.layer;
        if !kernels::available(Operation::Embedding, &self.device) {
            return;
        }
        let ids: Vec<i32> = (0..rows).map(|i| (i / 2) as i32).collect();
        let segments = RowsByToken::new(&ids, &self.device);
        let sum = Tensor::<2>::zeros([rows, width], (&self.device, self.dtype.1));
        let added = self.numbers(shape);
        // every row is read, and the sum of each token read and written
        let bytes = 2.0 * self.bytes(shape);
        self.time("embedding's gradient", bytes, sum, |sum| {
            kernels::scatter_add_rows(sum, &segments, &added).ok()
        });
    }

    /// Products of few rows with weights in 8 bits, and with the same as they are.
    fn quantised(&mut self) {
        let shape @ [outputs, inputs] = self.sizes.layer;
        let weights = self.numbers(shape);
        let Some(codes) = PackedWeights::quantize(&weights) else {
            return;
        };
        let all = codes.bytes() as f64;
        self.time("weights to 8 bits", self.bytes(shape) + all, (), |()| {
            PackedWeights::quantize(&weights).map(|_| ())
        });
        for rows in [1, 16, 64, 256] {
            let x = self.numbers([rows, inputs]);
            let rest = self.bytes([rows, inputs + outputs]);
            let exact = self.bytes(shape) + rest;
            self.time(&format!("product, {rows} rows"), exact, (), |()| {
                let _ = x.clone().matmul(weights.clone().transpose());
                Some(())
            });
            self.time(&format!("in 8 bits, {rows} rows"), all + rest, (), |()| {
                codes.linear(&x).map(|_| ())
            });
        }
    }

    fn update(&mut self) {
        let shape @ [rows, _] = self.sizes.layer;
        let step = AdamWStep {
            clip: 1.0,
            betas: [0.9, 0.95],
            eps: 1e-8,
            second_root: 0.5,
            rate: 1e-3,
            keep: 1.0,
        };
        let bytes = self.bytes(shape);
        let (value, gradient) = (self.numbers(shape), self.numbers(shape));
        let moments = [self.numbers(shape), self.numbers(shape).abs()];
        if kernels::has_adamw(&value) {
            let state = (value.clone(), moments);
            self.time("update", 7.0 * bytes, state, |(value, moments)| {
                let new = kernels::adamw(value, 0..rows, &gradient, Some(moments), None, &step);
                Some((new.value, new.moments))
            });
        }
        let table: Vec<f32> = (0..256).map(|i| i as f32 / 127.5 - 1.0).collect();
        let data = TensorData::new(table, [256]);
        let table = Tensor::<1>::from_data(data, (&self.device, DType::F32));
        let map = QuantizationMap {
            midpoints: &table,
            smallest: 0.0,
        };
        self.time("8 bits", 1.25 * bytes, value.clone(), |value| {
            kernels::quantize_blockwise(&value, &map).map(|_| value)
        });
        if let Some(blocks) = kernels::quantize_blockwise(&value, &map) {
            self.time(
                "8 bits back",
                1.25 * bytes,
                blocks,
                |blocks: QuantizedBlocks| {
                    kernels::dequantize_blockwise(&blocks, &table, shape, DType::F32)
                        .map(|_| blocks)
                },
            );
        }
    }
}
