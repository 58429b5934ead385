//! What the host does for a decoding step, a micro-batch of training and an optimizer step: kernels launched, by name,
//! and the time.
//!
//! `cargo bench --bench launches -- --device cuda [--rows N] [--model CONFIG.json] [--matmul cublaslt] [--json FILE]`; `--small` for a
//! processor or a software driver. The time is the host's own where the device is faster than it, or computes nothing (`tests/cuda` with
//! `STAND_IN_SKIP_KERNELS=1 STAND_IN_GIB=64`, or with NVRTC); elsewhere it is that of both. Of repeated runs the fastest counts: the
//! others were disturbed.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[allow(dead_code, reason = "each bench uses its own part")]
#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/results.rs"]
mod results;
#[path = "support/mod.rs"]
mod support;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use burn::tensor::Device;
use firebrick::backends::Precision;
use firebrick::backends::device::is_cpu;
use firebrick::backends::launches::{LaunchCounts, count, total};
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Executor, Gradients, Runtime};
use firebrick::engine::learner::train_cut;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::optim::{AdamW, OptimConfig};
use firebrick::engine::plan::MemoryConfig;
use firebrick::models::random::DrawKey;
use firebrick::models::{Arch, Decoder, Prepack};
use firebrick::sampler::{GenerationRequest, Generator, SamplingParams, SchedulerConfig};
use results::{Figures, rounded};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;
use support::{Options, fail};

/// New tokens of the two runs whose difference is measured: prompts, compilation and captures are in both.
const FEW: usize = 16;
const MANY: usize = 48;

/// Runs of which the fastest counts.
const REPEATS: usize = 7;

/// Tokens of a prompt, and of a sequence that is trained on.
const PROMPT: usize = 16;
const TRAINED: usize = 128;

/// How decoding steps run.
struct Case {
    name: &'static str,
    joined: bool,
    captured: bool,
}

const CASES: [Case; 3] = [
    Case { name: "kernel by kernel", joined: false, captured: false },
    Case { name: "joined matrices (pack_weights)", joined: true, captured: false },
    Case { name: "captured (cudagraph_capture_sizes)", joined: true, captured: true },
];

fn main() {
    allocator::as_in_the_program();
    let mut options = Options::parse(&["--rows", "--model", "--matmul"]);
    let (device, info) = options.open();
    let half = info.dtypes.contains(&"bf16") && !options.small;
    let rows = match options.own("--rows").map(str::parse) {
        None if options.small => 8,
        None => 64,
        Some(Ok(rows)) if rows > 0 => rows,
        Some(_) => fail("--rows needs a number of sequences"),
    };
    let decoder = Decoder::random(arch(&options, half), 1, &device);
    let layers = decoder.arch().num_layers;
    println!("{} ({}), {layers} layers, {rows} sequences, {}", info.name, info.device, decoder.arch().precision);
    let mut rows_of_figures = Vec::new();
    let mut figure = |name: &str, step: &Step| {
        let [per_layer, ms] = [step.kernels / layers as f64, 1e3 * step.seconds];
        let name = format!("{}, {name}", info.name);
        rows_of_figures.push(vec![name.into(), rounded(step.kernels, 0), rounded(per_layer, 1), rounded(ms, 2)]);
    };
    for case in &CASES {
        // a CPU captures nothing
        if case.captured && is_cpu(&device) {
            continue;
        }
        let step = step(&decoder, rows, case);
        let per_layer = step.kernels / layers as f64;
        println!(
            "{:<40} {:>8.1} kernels a step, {per_layer:>5.1} a layer, {:>9.3} ms",
            case.name,
            step.kernels,
            step.seconds * 1e3
        );
        print_names(&step);
        figure(case.name.split(" (").next().unwrap_or_default(), &step);
        options.write(&json!({
            "case": "decoding step", "name": case.name, "rows": rows, "layers": layers, "kernels": step.kernels,
            "kernels_per_layer": per_layer, "seconds": step.seconds
        }));
    }
    // every product, since none is large here
    let library = options.cublaslt(&device).then_some(0);
    for (case, part) in ["micro-batch", "optimizer step"].into_iter().zip(&update(decoder, &device, library)) {
        println!(
            "{case:<40} {:>8} kernels, {:>5.1} a layer, {:>9.3} ms",
            part.kernels,
            part.kernels / layers as f64,
            part.seconds * 1e3
        );
        print_names(part);
        figure(case, part);
        options.write(&json!({"case": case, "kernels": part.kernels, "layers": layers, "seconds": part.seconds}));
    }
    Figures {
        bench: "launches",
        title: "Kernels of a step",
        command: "cargo bench --bench launches -- --device cuda",
        what: "The 0.5B shape in bf16 with 64 sequences on the CUDA emulator, which skips kernels: time is the host's. \
               Four layers and 8 sequences on wgpu.",
        columns: &["case", "kernels", "kernels per layer", "time, ms"],
        rows: rows_of_figures,
    }
    .write();
}

/// The shape of `--model`, of Qwen2.5-0.5B, or one that a software driver gets through in seconds.
fn arch(options: &Options, half: bool) -> Arch {
    let config = if let Some(path) = options.own("--model") {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| fail(&format!("{path}: {e}")));
        serde_json::from_str(&text).unwrap_or_else(|e| fail(&format!("{path}: {e}")))
    } else if options.small {
        json!({
            "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2
        })
    } else {
        json!({
            "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true
        })
    };
    let Value::Object(config) = config else { fail("--model: a JSON object with transformers' keys is wanted") };
    let arch = Arch::from_config(&config, Path::new("bench"));
    let mut arch = arch.unwrap_or_else(|error| fail(&error.to_string()));
    if half {
        arch.precision = Precision::Bf16;
    }
    arch
}

fn print_names(step: &Step) {
    for (name, launches) in &step.by_name {
        println!("    {launches:>8.1} {name}");
    }
}

/// A decoding step, a micro-batch, or an optimizer step.
struct Step {
    kernels: f64,
    by_name: Vec<(String, f64)>,
    seconds: f64,
}

impl Step {
    fn faster(self, other: Self) -> Self {
        if self.seconds <= other.seconds { self } else { other }
    }
}

fn step(decoder: &Decoder, rows: usize, case: &Case) -> Step {
    let vocab = decoder.arch().vocab_size as u32;
    let requests: Vec<GenerationRequest> = (0..rows as u32)
        .map(|row| GenerationRequest {
            tokens: (0..PROMPT as u32).map(|i| (row * 31 + i * 7 + 1) % vocab).collect(),
            key: DrawKey { seed: 1, step: 0, prompt_index: row, sample: 0 },
            max_new_tokens: None,
        })
        .collect();
    let sizes = if case.captured { vec![rows] } else { Vec::new() };
    let run = |new: usize| {
        let sampling = SamplingParams { max_new_tokens: new, ..SamplingParams::default() };
        let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
        let generator = generator.prepack(Prepack { panels: case.joined, quantization: None });
        let generator = generator.capture_sizes(&sizes);
        let config = SchedulerConfig::new(rows);
        let (generated, counts) = count(|| generator.run_with(&requests, 1, &config, |_| {}));
        let stats = generated.expect("samples").stats;
        (stats.decode_steps, stats.decode_time, counts)
    };
    // kernels are compiled
    run(FEW);
    let fastest = |new: usize| {
        let runs = (0..REPEATS).map(|_| run(new));
        runs.min_by_key(|(_, took, _)| *took).expect("runs")
    };
    let ((few, short, first), (many, long, all)) = (fastest(FEW), fastest(MANY));
    let steps = (many - few) as f64;
    Step {
        kernels: (total(&all) - total(&first)) as f64 / steps,
        by_name: difference(&all, &first, steps),
        seconds: (long.as_secs_f64() - short.as_secs_f64()) / steps,
    }
}

/// Launches of a step by the kernel's name, the most frequent first.
fn difference(all: &LaunchCounts, first: &LaunchCounts, steps: f64) -> Vec<(String, f64)> {
    let mut by_name: Vec<(String, f64)> = all
        .iter()
        .map(|(name, &launches)| {
            let before = first.get(name).copied().unwrap_or(0);
            (name.clone(), (launches as f64 - before as f64) / steps)
        })
        .filter(|(_, launches)| *launches > 0.0)
        .collect();
    by_name.sort_by(|a, b| b.1.total_cmp(&a.1));
    by_name
}

/// Kernels and seconds of the gradients of a few sequences, all activations kept, and of the optimizer step with them.
fn update(mut decoder: Decoder, device: &Device, cublaslt: Option<usize>) -> [Step; 2] {
    let vocab = decoder.arch().vocab_size;
    let sequences = workload::sequences([TRAINED; 4], vocab);
    let memory = MemoryConfig { train_tokens: 4 * TRAINED, ..MemoryConfig::default() };
    let plan = memory.plan(decoder.arch()).expect("a plan");
    let batch = Batch::pack(&sequences, train_cut(&plan, &decoder)).expect("micro-batches");
    let runtime = Runtime::new(device).with_cublaslt(cublaslt);
    let mut optimizer = AdamW::new(OptimConfig::default(), &decoder);
    let mut run = || {
        let mut gradients = Gradients::planned(decoder.specs().count(), &plan, &runtime);
        let micro = measured(device, || {
            Executor::new(&plan, &runtime, 1.0)
                .backward(&mut decoder, &batch.micros(), &Nll, &mut gradients, None)
                .expect("a backward pass");
        });
        let step = measured(device, || {
            optimizer.step(&mut decoder, gradients, 1e-4, &runtime).expect("an optimizer step");
        });
        [micro, step]
    };
    // kernels are compiled
    run();
    let runs = (0..REPEATS).map(|_| run());
    let fastest = |[a, b]: [Step; 2], [c, d]: [Step; 2]| [a.faster(c), b.faster(d)];
    runs.reduce(fastest).expect("runs")
}

/// Kernels and seconds of some work.
fn measured(device: &Device, work: impl FnOnce()) -> Step {
    let started = Instant::now();
    let ((), counts) = count(|| {
        work();
        device.sync().expect("a device that works");
    });
    Step {
        kernels: total(&counts) as f64,
        by_name: difference(&counts, &LaunchCounts::default(), 1.0),
        seconds: started.elapsed().as_secs_f64(),
    }
}
