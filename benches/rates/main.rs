//! How fast a device is at what decoders are made of: matrix products and attention at the shapes of Qwen2.5-0.5B and
//! 1.5B, copies, launches. Products stand beside the best square one of the same run.
//!
//! `cargo bench --bench rates -- --device cuda [--only KIND,KIND] [--matmul cublaslt] [--json FILE]`, of `KINDS`; `--small`
//! for a processor or a software driver.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

mod shapes;
#[allow(dead_code, reason = "each bench uses its own part")]
#[path = "../support/mod.rs"]
mod support;

use burn::tensor::{DType, Device, Distribution, Tensor};
use firebrick::backends::DeviceInfo;
use firebrick::backends::device::{is_cpu, panic_message};
use firebrick::backends::kernels::{self, Transposed};
use firebrick::backends::transfer::HostTensor;
use firebrick::engine::batch::grouping;
use firebrick::models::attention::{AttentionParams, Qkv, SequenceLayout, attend, attend_backward};
use serde_json::{Value, json};
use shapes::{FULL, LITTLE, Model, Pass, Product, decoded, lengths, products};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use support::{Options, fail};

/// Each number is measured for about this long.
const PATIENCE: Duration = Duration::from_millis(200);

/// Queries scored at a time, as `memory.attention_rows` has it.
const ATTENTION_ROWS: usize = 512;

/// Kinds of cases: launches and copies, matmuls of training, matmuls of decoding, attention as models do it and in
/// operations, attention over the batches that `PyTorch`'s kernels are compared on.
const KINDS: [&str; 5] = ["copies", "products", "decode", "operations", "attention"];

/// A device under measurement.
struct Bench {
    device: Device,
    options: Options,
}

fn main() {
    let options = Options::parse(&["--only", "--matmul"]);
    let only: Vec<String> = options
        .own("--only")
        .map_or_else(|| KINDS.map(String::from).to_vec(), |kinds| kinds.split(',').map(String::from).collect());
    if let Some(unknown) = only.iter().find(|kind| !KINDS.contains(&kind.as_str())) {
        fail(&format!("--only {unknown} is no kind of case; there are {}", KINDS.join(", ")));
    }
    let (device, info) = options.open();
    let least = options.cublaslt(&device).then_some(kernels::CUBLASLT_OPERATIONS);
    kernels::with_cublaslt(least, || measure(options, &only, (device, &info)));
}

/// Measures kinds of cases.
fn measure(options: Options, only: &[String], (device, info): (Device, &DeviceInfo)) {
    let wants = |kind: &str| only.iter().any(|wanted| wanted == kind);
    let sizes = if options.small { &LITTLE } else { &FULL };
    let mut bench = Bench { device, options };
    println!("{} ({})", info.name, info.device);
    bench.options.write(&json!({
        "case": "device", "device": info.device.to_string(), "name": info.name, "dtypes": info.dtypes
    }));
    if wants("copies") {
        bench.launches();
        bench.copies(sizes.copied);
    }
    let types = [("bf16", DType::BF16), ("f32", DType::F32)];
    let known: Vec<_> = types.into_iter().filter(|(name, _)| info.dtypes.contains(name)).collect();
    for &(name, dtype) in &known {
        if wants("products") {
            let squares = sizes.squares.iter().map(|&side| Product {
                name: format!("square {side}"),
                rows: side,
                inner: side,
                outputs: side,
                pass: Pass::Forward,
            });
            let best = squares.filter_map(|product| bench.product(&product, (name, dtype), None)).fold(0.0, f64::max);
            for product in sizes.models.iter().flat_map(|model| products(model, sizes)) {
                bench.product(&product, (name, dtype), Some(best));
            }
        }
        if wants("operations") {
            for model in sizes.models {
                for &length in sizes.lengths {
                    let lengths = vec![length; sizes.tokens / length];
                    bench.attention(model, &lengths, (name, dtype), true);
                    // on a GPU the choice between the two is made by what this measures
                    if !is_cpu(&bench.device) {
                        bench.attention(model, &lengths, (name, dtype), false);
                    }
                }
            }
        }
    }
    // the type that a device trains and samples in
    let first = known[0];
    for model in sizes.models {
        if wants("decode") {
            for product in decoded(model, sizes) {
                bench.product(&product, first, None);
            }
        }
        if wants("attention") {
            for &batch in sizes.batches {
                bench.attention(model, &lengths(batch), first, true);
            }
        }
    }
}

impl Bench {
    /// Runs a case and writes it down. What fails is said, and the next one tried.
    fn case(&mut self, mut line: Value, work: impl FnOnce(&Device) -> Value) -> Option<f64> {
        let done = catch_unwind(AssertUnwindSafe(|| work(&self.device)));
        let found = done.unwrap_or_else(|panic| json!({"error": panic_message(panic.as_ref())}));
        if let (Value::Object(line), Value::Object(found)) = (&mut line, found) {
            line.extend(found);
        }
        self.options.write(&line);
        let words = ["case", "name", "dtype", "rows", "pass", "batch"];
        let words = words.iter().filter_map(|key| match &line[*key] {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            other => Some(other.to_string()),
        });
        let what = words.collect::<Vec<_>>().join(" ");
        let number = |key: &str| line[key].as_f64();
        match (number("seconds"), number("tflops"), number("bytes_per_second")) {
            (Some(_), Some(rate), _) => println!("{what:<48} {rate:>10.3} TFLOP/s"),
            (Some(_), _, Some(rate)) => println!("{what:<48} {:>10.3} GB/s", rate / 1e9),
            (Some(seconds), ..) => println!("{what:<48} {:>10.3} µs", seconds * 1e6),
            (None, ..) => println!("{what:<48} failed: {}", line["error"]),
        }
        number("tflops")
    }

    /// An operation so small that launching it is all it costs.
    fn launches(&mut self) {
        const CHAIN: usize = 256;
        self.case(json!({"case": "launch"}), |device| {
            let x = Tensor::<2>::ones([1, 8], device);
            let time = seconds(device, || {
                let _ = (0..CHAIN).fold(x.clone(), |x, _| x + 1.0);
            });
            json!({"seconds": time / CHAIN as f64})
        });
    }

    /// Over the device's own memory, one read and one write for a number; to the device from pinned memory, and back.
    fn copies(&mut self, side: usize) {
        let bytes = side * side * 4;
        let rate = |moved: usize, time: f64| json!({"seconds": time, "bytes_per_second": moved as f64 / time});
        let shape = [side, side];
        let line = |case: &str| json!({"case": case, "bytes": bytes});
        self.case(line("copy"), |device| {
            let x = Tensor::<2>::ones(shape, device);
            let time = seconds(device, || {
                let _ = x.clone() + 1.0;
            });
            rate(2 * bytes, time)
        });
        if is_cpu(&self.device) {
            return;
        }
        self.case(line("host to device"), |device| {
            let mut host = HostTensor::from_values(vec![1.0; side * side], shape);
            host.pin(device);
            rate(
                bytes,
                shortest(
                    device,
                    || host.clone(),
                    |host| {
                        let _ = host.into_device(device);
                    },
                ),
            )
        });
        self.case(line("device to host"), |device| {
            let x = Tensor::<2>::ones(shape, device);
            let time = shortest(
                device,
                || x.clone() + 1.0,
                |x| {
                    HostTensor::download(x).expect("a copy");
                },
            );
            rate(bytes, time)
        });
    }

    /// `TFLOP/s` of a product.
    fn product(&mut self, product: &Product, (name, dtype): (&str, DType), best: Option<f64>) -> Option<f64> {
        let &Product { rows, inner, outputs, pass, .. } = product;
        let line = json!({
            "case": "product", "name": product.name, "dtype": name, "pass": pass.name(),
            "rows": rows, "inner": inner, "outputs": outputs
        });
        self.case(line, |device| {
            let x = random([rows, inner], dtype, device);
            let w = random([outputs, inner], dtype, device);
            let dy = match pass {
                Pass::Forward => None,
                _ => Some(random([rows, outputs], dtype, device)),
            };
            let time = seconds(device, || {
                let _ = match (&dy, pass) {
                    // as models do it
                    (Some(dy), Pass::Inputs) => kernels::matmul(dy, &w, Transposed::Neither),
                    (Some(dy), _) => kernels::matmul(dy, &x, Transposed::Left),
                    (None, _) => kernels::linear(&x, &w),
                };
            });
            let rate = 2.0 * (rows * inner * outputs) as f64 / time / 1e12;
            json!({"seconds": time, "tflops": rate, "of_best_square": best.map(|best| rate / best)})
        })
    }

    /// Causal attention of sequences, and its gradient; only pairs that see each other count. As models do it, or in
    /// tensor operations.
    fn attention(&mut self, model: &Model, lengths: &[usize], (name, dtype): (&str, DType), as_models: bool) {
        let &Model { heads, kv_heads, head_dim, .. } = model;
        let case = if as_models { "attention" } else { "attention in operations" };
        let pairs: usize = lengths.iter().map(|length| heads * length * (length + 1) / 2).sum();
        let work = 4.0 * pairs as f64 * head_dim as f64;
        let batch = match [lengths.iter().min(), lengths.iter().max()] {
            [shortest, longest] if shortest == longest => format!("{} x {}", lengths.len(), lengths[0]),
            _ => format!("{} of {} to {}", lengths.len(), lengths[0], lengths[lengths.len() - 1]),
        };
        let line = |pass: &str| {
            json!({
                "case": case, "name": model.name, "dtype": name, "pass": pass, "batch": batch, "lengths": lengths,
                "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim
            })
        };
        let made = |device: &Device| {
            kernels::set_enabled(as_models);
            let made = Attention::new(model, lengths, dtype, device);
            kernels::set_enabled(true);
            made
        };
        let rate = |work: f64, time: f64| json!({"seconds": time, "tflops": work / time / 1e12});
        self.case(line("forward"), |device| {
            let attention = made(device);
            let time = seconds(device, || {
                let _ = attention.forward();
            });
            rate(work, time)
        });
        self.case(line("backward"), |device| {
            let attention = made(device);
            rate(2.5 * work, attention.backward_seconds(device))
        });
    }
}

/// Queries, keys and values of some sequences, and a gradient of what they are mixed to.
struct Attention {
    qkv: Qkv,
    gradient: Tensor<2>,
    params: AttentionParams,
    sequences: SequenceLayout,
}

impl Attention {
    fn new(model: &Model, lengths: &[usize], dtype: DType, device: &Device) -> Self {
        let tokens = lengths.iter().sum();
        let rows = |heads: usize| {
            random([tokens, heads * model.head_dim], dtype, device).reshape([tokens, heads, model.head_dim])
        };
        let grouping = grouping(ATTENTION_ROWS, device);
        Self {
            qkv: Qkv { q: rows(model.heads), k: rows(model.kv_heads), v: rows(model.kv_heads), sinks: None },
            gradient: random([tokens, model.heads * model.head_dim], dtype, device),
            params: AttentionParams { scale: 1.0 / (model.head_dim as f64).sqrt(), softcap: None, window: None },
            sequences: SequenceLayout::packed(lengths, grouping, device).prepared(&[None], ATTENTION_ROWS, device),
        }
    }

    fn forward(&self) -> Tensor<2> {
        attend(&self.qkv, self.params, &self.sequences)
    }

    /// The gradient alone: where the graph holds it, forward and backward less forward.
    fn backward_seconds(&self, device: &Device) -> f64 {
        if self.sequences.recomputes() {
            let mixed = self.forward();
            return seconds(device, || {
                let (mixed, gradient) = (mixed.clone(), self.gradient.clone());
                let _ = attend_backward(&self.qkv, mixed, gradient, self.params, &self.sequences);
            });
        }
        let whole = seconds(device, || {
            let leaf = |t: &Tensor<3>| t.clone().autodiff().require_grad();
            let qkv = Qkv { q: leaf(&self.qkv.q), k: leaf(&self.qkv.k), v: leaf(&self.qkv.v), sinks: None };
            let mixed = attend(&qkv, self.params, &self.sequences);
            let _ = (mixed * self.gradient.clone().autodiff()).sum().backward();
        });
        let forward = seconds(device, || {
            let _ = self.forward();
        });
        (whole - forward).max(f64::MIN_POSITIVE)
    }
}

/// Normal numbers: a device that multiplies ones draws less power and is faster than with real values.
fn random(shape: [usize; 2], dtype: DType, device: &Device) -> Tensor<2> {
    // on CUDA Burn would put padding between rows, which a model's tensors have not
    let [rows, columns] = shape;
    let values = Tensor::<1>::random([rows * columns], Distribution::Normal(0.0, 1.0), device);
    values.cast(dtype).reshape(shape)
}

/// Seconds a run, after one that does not count. Several are in the queue at a time, so that waiting is not what is
/// timed.
fn seconds(device: &Device, mut work: impl FnMut()) -> f64 {
    let wait = || device.sync().expect("a device that computes");
    work();
    wait();
    let started = Instant::now();
    work();
    wait();
    let one = started.elapsed();
    let batch = (PATIENCE.as_secs_f64() / 4.0 / one.as_secs_f64().max(1e-6)).clamp(1.0, 100.0) as u32;
    let (started, mut runs) = (Instant::now(), 0);
    while runs == 0 || started.elapsed() < PATIENCE {
        for _ in 0..batch {
            work();
        }
        wait();
        runs += batch;
    }
    started.elapsed().as_secs_f64() / f64::from(runs)
}

/// Seconds of the fastest of some runs on what `before` makes, whose time does not count.
fn shortest<T>(device: &Device, before: impl Fn() -> T, work: impl Fn(T)) -> f64 {
    let wait = || device.sync().expect("a device that computes");
    let runs = (0..6).map(|_| {
        let input = before();
        wait();
        let started = Instant::now();
        work(input);
        wait();
        started.elapsed().as_secs_f64()
    });
    runs.fold(f64::INFINITY, f64::min)
}
