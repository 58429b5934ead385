//! What every memory technique saves and costs: peak bytes by category, the counted heap, and seconds, against the
//! plain plan in the same run.
//!
//! `cargo bench --no-default-features --bench techniques` on the CPU, a decoder of 26 M parameters with a vocabulary of
//! 32,768, 1,024 tokens; `cargo bench --bench techniques -- wgpu` on a GPU, 1 M parameters. Times of a software driver
//! are left out. A model of one's own is `--model CONFIG.json` (transformers' keys), `--sequences N`, `--length
//! TOKENS`, `--precision bf16`; `--only 'NAME;NAME'` leaves out techniques, `--json FILE` writes a line for each.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/results.rs"]
mod results;
#[allow(dead_code, reason = "each bench uses its own part")]
mod support;

use burn::tensor::Device;
use firebrick::backends::accounts::{Category, Home};
use firebrick::backends::allocator::{CountingAllocator, heap, reset_peak};
use firebrick::backends::device::{Backend, is_cpu, panic_message};
use firebrick::backends::memory::read;
use firebrick::backends::profile;
use firebrick::backends::{DeviceInfo, Precision, PrecisionExt};
use firebrick::engine::executor::{Residency, Runtime};
use firebrick::engine::learner::Learner;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::optim::OptimConfig;
use firebrick::engine::plan::estimate::{EstimatePhase, Workload, estimate};
use firebrick::engine::plan::{Granularity, MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload};
use firebrick::engine::sequence::{Sequence, TokenColumns};
use firebrick::models::adapter::LoraConfig;
use firebrick::models::{Arch, Decoder};
use results::{Figures, rounded};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;
use support::{Options, fail};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Updates that are timed, after one that is not.
const RUNS: usize = 3;

/// What adapters beside frozen weights are called here: not a setting of memory, but what they save is of the same
/// kind.
const LORA: [&str; 2] = ["lora, rank 16", "  lora, rank 16"];

type Technique = (&'static str, fn(&mut MemoryConfig));

const TECHNIQUES: [Technique; 22] = [
    ("plain", |_| {}),
    ("head_rows 64", |m| m.head_rows = 64),
    ("attention_rows 128", |m| m.attention_rows = 128),
    ("gradient_checkpointing", checkpointed),
    ("  checkpoint_every 2", |m| {
        checkpointed(m);
        m.checkpoint_every = 2;
    }),
    ("  checkpoint_ratio 0.5", |m| {
        checkpointed(m);
        m.checkpoint_ratio = Some(0.5);
    }),
    ("  recompute_granularity half", |m| {
        checkpointed(m);
        m.recompute_granularity = Granularity::Half;
    }),
    ("  activation_offload", |m| {
        checkpointed(m);
        m.activation_offload = true;
    }),
    ("  activation_offload, copied in place", |m| {
        checkpointed(m);
        m.activation_offload = true;
        m.prefetch = 0;
    }),
    ("  micro_batch_size 1", |m| {
        checkpointed(m);
        m.micro_batch_size = Some(1);
    }),
    ("  param_offload streamed", |m| {
        checkpointed(m);
        m.param_offload = ParamOffload::Streamed;
    }),
    ("  streamed, segment_major, micro_batch_size 1", |m| {
        checkpointed(m);
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.micro_batch_size = Some(1);
    }),
    ("grad_offload", |m| m.grad_offload = true),
    ("optimizer_offload idle", |m| {
        m.optimizer_offload = OptimizerOffload::Idle;
    }),
    ("optimizer_offload cpu", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
    }),
    ("  offload_fraction 0.5", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.offload_fraction = 0.5;
    }),
    ("moments bf16", |m| m.moments = MomentKind::Bf16),
    ("moments block8", |m| m.moments = MomentKind::Block8),
    ("step_in_backward", |m| m.step_in_backward = true),
    ("everything on the host (huge)", |m| {
        checkpointed(m);
        m.activation_offload = true;
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.grad_offload = true;
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.head_rows = 64;
        m.attention_rows = 128;
    }),
    (LORA[0], |_| {}),
    (LORA[1], checkpointed),
];

fn checkpointed(memory: &mut MemoryConfig) {
    memory.gradient_checkpointing = true;
}

struct Size {
    config: Value,
    sequences: usize,
    length: usize,
}

/// 26 M parameters, tied, 1,024 tokens.
fn large() -> Size {
    Size {
        config: json!({
            "model_type": "llama", "vocab_size": 32_768, "hidden_size": 384, "intermediate_size": 1024,
            "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": true
        }),
        sequences: 4,
        length: 256,
    }
}

/// For a software driver.
fn small() -> Size {
    Size {
        config: json!({
            "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2
        }),
        sequences: 4,
        length: 64,
    }
}

fn sequences(size: &Size, vocab: usize) -> Vec<Sequence> {
    (0..size.sequences)
        .map(|i| Sequence {
            tokens: (0..size.length).map(|t| ((t * 7919 + i * 104_729) % vocab) as u32).collect(),
            positions: (0..size.length - 1).collect(),
            columns: TokenColumns { weight: Some(vec![1e-3; size.length - 1]), ..TokenColumns::default() },
            ..Sequence::default()
        })
        .collect()
}

struct Measured {
    seconds: f64,
    heap: u64,
    device: Vec<(Category, u64)>,
    /// Most in use at a boundary, by the pool's own count.
    pool: u64,
    /// What the pools held in the end.
    reserved: u64,
    /// Weights of the bench's own; left out of `pool` and `reserved`.
    idle: u64,
    /// What the estimator says of the same.
    predicted: u64,
}

fn learner(decoder: &Decoder, memory: &MemoryConfig, measuring: bool) -> Learner {
    let plan = memory.plan(decoder.arch()).expect("a plan");
    let runtime = Runtime::new(decoder.device()).with_prefetch(plan.prefetch);
    let runtime = if measuring { runtime.measuring() } else { runtime };
    let optim = OptimConfig { clip_grad: None, ..OptimConfig::default() };
    let mut learner = Learner::new(decoder.clone(), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    learner
}

/// Median seconds of some updates.
fn timed(learner: &mut Learner, rows: &[Sequence], runs: usize) -> f64 {
    let device = learner.decoder().device().clone();
    let mut update = || {
        let started = Instant::now();
        let updated = learner.update(rows, 1.0, &Nll, 1e-4).expect("an update");
        device.sync().expect("a device that computes");
        assert!(updated.outcome.applied);
        started.elapsed().as_secs_f64()
    };
    let mut seconds: Vec<f64> = (0..runs).map(|_| update()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn measure(decoder: &Decoder, rows: &[Sequence], memory: &MemoryConfig, runs: usize) -> Measured {
    let device = decoder.device();
    // a copy of the weights that the learner replaces at its first step, unless they are frozen
    let idle = match decoder.lora() {
        Some(_) => 0,
        None => decoder.bytes_in(Home::Device) as u64,
    };
    let predicted = predict(decoder, rows, memory);
    let mut counted = learner(decoder, memory, true);
    // the first does not count
    timed(&mut counted, rows, 1);
    counted.runtime.accounts.reset_peaks();
    let _ = counted.runtime.take_most();
    reset_peak();
    let on_cpu = is_cpu(device);
    let seconds = timed(&mut counted, rows, if on_cpu { runs } else { 1 });
    let accounts = &counted.runtime.accounts;
    let mut found = Measured {
        seconds,
        heap: heap().map_or(0, |h| h.peak_bytes),
        device: Category::ALL.into_iter().map(|c| (c, accounts.balance(c, Home::Device).peak_bytes)).collect(),
        pool: counted.runtime.take_most().saturating_sub(idle),
        reserved: 0,
        idle,
        predicted,
    };
    if !on_cpu {
        // reading the pools at every boundary waits for the device: times are those of a run that does not
        drop(counted);
        device.memory_cleanup();
        let mut free = learner(decoder, memory, false);
        timed(&mut free, rows, 1);
        found.seconds = timed(&mut free, rows, runs);
        found.reserved = read(device).reserved_bytes.saturating_sub(idle);
        drop(free);
        device.memory_cleanup();
    }
    found
}

/// Device bytes in use at the worst moment of an update, what the pool adds left out.
fn predict(decoder: &Decoder, rows: &[Sequence], memory: &MemoryConfig) -> u64 {
    let length = rows[0].tokens.len() as u64;
    let workload = Workload {
        clips: false,
        lora: decoder.lora().cloned(),
        ..Workload::grpo(decoder.arch().clone(), [1, length - 1], rows.len() as u64, 1)
    };
    let plan = memory.plans(decoder.arch(), false, None, 1).expect("a plan");
    let estimate = estimate(&workload, &plan, &profile::assumed(Backend::Wgpu));
    estimate.phase(EstimatePhase::Backward).map_or(0, |phase| {
        let overhead = phase.categories.get(&Category::Overhead);
        phase.total_bytes - overhead.copied().unwrap_or(0)
    })
}

/// What the command line asks for.
fn size(options: &Options, on_cpu: bool) -> Size {
    let mut size = if on_cpu && !options.small { large() } else { small() };
    if let Some(path) = options.own("--model") {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
        size.config = serde_json::from_str(&text).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
    }
    let number = |flag: &str, otherwise: usize| {
        let given = options.own(flag).map(str::parse);
        match given.transpose() {
            Ok(value) => value.unwrap_or(otherwise),
            Err(_) => fail(&format!("{flag} should be a number")),
        }
    };
    size.sequences = number("--sequences", size.sequences);
    size.length = number("--length", size.length);
    size
}

/// The model on the device, in the precision that is asked for.
fn model(size: &Size, options: &Options, device: &Device) -> Decoder {
    let Value::Object(config) = &size.config else { fail("--model: a JSON object with transformers' keys is wanted") };
    let name = options.own("--precision").unwrap_or("f32");
    let precision = Precision::ALL.into_iter().find(|p| p.name() == name);
    let precision = precision.unwrap_or_else(|| fail(&format!("--precision {name}: f32, bf16 or f16")));
    precision.check(device).unwrap_or_else(|error| fail(&error.to_string()));
    let arch = Arch::from_config(config, Path::new("bench")).unwrap_or_else(|error| fail(&error.to_string()));
    Decoder::random(arch.in_precision(precision), 1, device)
}

/// The techniques that are asked for.
fn chosen(options: &Options, info: &DeviceInfo) -> Vec<Technique> {
    let only = options.own("--only").map(|names| names.split(';').collect::<Vec<_>>());
    if let Some(only) = &only
        && let Some(unknown) = only.iter().find(|name| TECHNIQUES.iter().all(|(known, _)| known != *name))
    {
        fail(&format!("--only: there is no technique `{unknown}`"));
    }
    let mut all = TECHNIQUES.to_vec();
    all.retain(|(name, _)| only.as_ref().is_none_or(|only| only.contains(name)));
    all.retain(|(name, _)| *name != "moments bf16" || info.dtypes.contains(&"bf16"));
    all
}

fn main() {
    let mut options = Options::parse(&["--model", "--sequences", "--length", "--precision", "--only"]);
    let (device, info) = options.open();
    let on_cpu = is_cpu(&device);
    let size = size(&options, on_cpu);
    let decoder = model(&size, &options, &device);
    let rows = sequences(&size, decoder.arch().vocab_size);
    println!("{} parameters, {} tokens, {}\n", decoder.num_params(), size.sequences * size.length, info.name);
    println!(
        "| plan | parameters | gradients | moments | kept inputs | live graph | {} | time |",
        if on_cpu { "peak heap" } else { "in use, predicted | in use, read" }
    );
    let last = if on_cpu { "" } else { "---:|" };
    println!("|---|---:|---:|---:|---:|---:|---:|---:|{last}");
    let adapters = LoraConfig::default();
    let with_adapters = decoder.with_fresh_adapters(adapters, 1).expect("adapters");
    let mut plain = None;
    let mut rows_of_figures = Vec::new();
    for (name, turn_on) in chosen(&options, &info) {
        let mut memory = MemoryConfig::default();
        turn_on(&mut memory);
        let own = if LORA.contains(&name) { &with_adapters } else { &decoder };
        let runs = if info.software { 1 } else { RUNS };
        let found = catch_unwind(AssertUnwindSafe(|| measure(own, &rows, &memory, runs)));
        let name = name.replace("  ", "… ");
        match found {
            Ok(found) => {
                let base = *plain.get_or_insert(found.seconds);
                let time = (!info.software).then_some(found.seconds / base);
                print_row(&name, &found, time, on_cpu);
                rows_of_figures.push(figures(&name, &found, time));
                options.write(&line(&name, &found, time));
            }
            Err(panic) => {
                let why = panic_message(panic.as_ref());
                println!("| {name} | failed: {why} |");
                options.write(&json!({"technique": name, "error": why}));
                device.memory_cleanup();
            }
        }
    }
    if on_cpu && !options.small && options.own("--only").is_none() {
        head_alone(&decoder);
        Figures {
            bench: "techniques",
            title: "Memory techniques on a CPU",
            command: "cargo bench --no-default-features --bench techniques",
            what: "An update of 4 × 256 tokens of a decoder of 25.6 M parameters, whose tensors on the device are in \
                   accounts. Offloaded tensors stay in the heap of a CPU. A row with … adds to gradient checkpointing.",
            columns: &COLUMNS,
            rows: rows_of_figures,
        }
        .write();
    }
}

/// Columns of the figures.
const COLUMNS: [&str; 9] = [
    "plan",
    "parameters, MiB",
    "gradients, MiB",
    "moments, MiB",
    "checkpointed activations, MiB",
    "live graph, MiB",
    "accounts, MiB",
    "peak heap, MiB",
    "relative time",
];

/// A row of [`COLUMNS`].
fn figures(name: &str, found: &Measured, time: Option<f64>) -> Vec<Value> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let accounts =
        [Category::Parameters, Category::Gradients, Category::Moments, Category::KeptInputs, Category::LiveGraph];
    let accounts =
        accounts.map(|category| mib(found.device.iter().find(|own| own.0 == category).map_or(0, |own| own.1)));
    let mut row = vec![name.into()];
    row.extend(accounts.map(|account| rounded(account, 1)));
    row.extend([accounts.iter().sum::<f64>(), mib(found.heap)].map(|bytes| rounded(bytes, 1)));
    row.push(time.map_or(Value::Null, |time| rounded(time, 2)));
    row
}

fn print_row(name: &str, found: &Measured, time: Option<f64>, on_cpu: bool) {
    let of = |category| {
        let own = found.device.iter().find(|(c, _)| *c == category);
        mib(own.map_or(0, |(_, bytes)| *bytes))
    };
    let cells = [
        of(Category::Parameters),
        of(Category::Gradients),
        of(Category::Moments),
        of(Category::KeptInputs),
        of(Category::LiveGraph),
        if on_cpu { mib(found.heap) } else { format!("{} | {}", mib(found.predicted), mib(found.pool)) },
        time.map_or_else(|| "-".to_owned(), |time| format!("{time:.2}")),
    ];
    println!("| {name} | {} |", cells.join(" | "));
}

/// The same for a script. `peak_bytes` is the counted heap on the CPU and what the pools held elsewhere.
fn line(name: &str, found: &Measured, time: Option<f64>) -> Value {
    let accounts: serde_json::Map<String, Value> =
        found.device.iter().map(|(category, bytes)| (category.name().to_owned(), json!(bytes))).collect();
    let peak = if found.reserved > 0 { found.reserved } else { found.heap.saturating_sub(found.idle) };
    json!({
        "technique": name, "seconds": found.seconds, "of_plain": time, "peak_bytes": peak,
        "in_use_bytes": found.pool, "predicted_bytes": found.predicted, "accounts": accounts
    })
}

/// The head's memory against `head_rows` and against the number of tokens.
fn head_alone(decoder: &Decoder) {
    let head = decoder.head();
    println!("\n| tokens | head_rows | peak over the weight's gradient and the rows | time |");
    println!("|---:|---:|---:|---:|");
    let hidden_size = decoder.arch().hidden_size;
    let mut first = None;
    for (tokens, head_rows) in [(1024, 1024), (1024, 256), (1024, 64), (4096, 256), (16_384, 256)] {
        let hidden = burn::tensor::Tensor::<2>::ones([tokens, hidden_size], decoder.device());
        let targets = burn::tensor::Tensor::<1, burn::tensor::Int>::zeros([tokens], decoder.device());
        let mut seconds = f64::INFINITY;
        let mut peak = 0;
        for _ in 0..2 {
            let before = heap().map_or(0, |h| h.current_bytes);
            reset_peak();
            let started = Instant::now();
            let mut sum: Option<burn::tensor::Tensor<2>> = None;
            let mut rows = Vec::new();
            for start in (0..tokens).step_by(head_rows) {
                let len = head_rows.min(tokens - start);
                let chunk =
                    head.chunk(hidden.clone().narrow(0, start, len), targets.clone().narrow(0, start, len), 1.0, false);
                let ones = chunk.scores.logp.ones_like();
                let found = chunk.backward(&ones, None, &mut sum);
                rows.push(found.hidden);
                if let Some(own) = found.projection {
                    sum = Some(match sum.take() {
                        Some(sum) => sum + own,
                        None => own,
                    });
                }
            }
            seconds = seconds.min(started.elapsed().as_secs_f64());
            let weights = 2 * decoder.arch().vocab_size * hidden_size * 4;
            let kept = tokens * hidden_size * 4;
            let heap = heap().map_or(0, |h| h.peak_bytes);
            peak = heap.saturating_sub(before + (weights + kept) as u64);
        }
        let base = *first.get_or_insert(seconds / tokens as f64);
        println!("| {tokens} | {head_rows} | {} | {:.2} |", mib(peak), seconds / tokens as f64 / base);
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}
