//! What every memory technique saves and costs: peak bytes by category, the counted heap, and seconds, against the plain
//! plan in the same run.
//!
//! `cargo bench --no-default-features --bench techniques` on the CPU, a decoder of 26 M parameters with a vocabulary of
//! 32,768, 1,024 tokens; `cargo bench --bench techniques -- wgpu` on a GPU, 1 M parameters, bytes only.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use firebrick::backends::accounts::{Category, Home};
use firebrick::backends::allocator::{CountingAllocator, heap, reset_peak};
use firebrick::backends::device::{Backend, open};
use firebrick::backends::profile::DeviceProfile;
use firebrick::engine::batch::Sequence;
use firebrick::engine::learner::Learner;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::optim::OptimConfig;
use firebrick::engine::placed::Use;
use firebrick::engine::plan::estimate::{Workload, estimate};
use firebrick::engine::plan::{
    Granularity, MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload,
};
use firebrick::engine::runtime::Runtime;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Updates that are timed, after one that is not.
const RUNS: usize = 3;

type Technique = (&'static str, fn(&mut MemoryConfig));

const TECHNIQUES: [Technique; 20] = [
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
            tokens: (0..size.length)
                .map(|t| ((t * 7919 + i * 104_729) % vocab) as u32)
                .collect(),
            positions: (0..size.length - 1).collect(),
            weights: vec![1e-3; size.length - 1],
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
    /// What the estimator says of the same.
    predicted: u64,
}

fn measure(decoder: &Decoder, rows: &[Sequence], memory: &MemoryConfig, runs: usize) -> Measured {
    // a copy of the weights that the learner replaces at its first step
    let idle = decoder.bytes_in(Home::Device) as u64;
    let predicted = predict(decoder, rows, memory);
    let plan = memory.plan(decoder.arch()).expect("a plan");
    let runtime = Runtime::new(decoder.device())
        .with_prefetch(plan.prefetch)
        .measuring();
    let optim = OptimConfig {
        clip_grad: None,
        ..OptimConfig::default()
    };
    let mut learner = Learner::new(decoder.clone(), plan, optim, runtime);
    learner
        .model
        .settle(Use::Pass)
        .expect("weights in their place");
    let mut update = || {
        let updated = learner.update(rows, 1.0, &Nll, 1e-4).expect("an update");
        assert!(updated.outcome.applied);
    };
    update();
    learner.runtime.accounts.reset_peaks();
    let _ = learner.runtime.take_most();
    let mut update = || {
        let updated = learner.update(rows, 1.0, &Nll, 1e-4).expect("an update");
        assert!(updated.outcome.applied);
    };
    let mut seconds: Vec<f64> = Vec::new();
    reset_peak();
    for _ in 0..runs {
        let started = Instant::now();
        update();
        seconds.push(started.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    let accounts = &learner.runtime.accounts;
    Measured {
        seconds: seconds[seconds.len() / 2],
        heap: heap().map_or(0, |h| h.peak_bytes),
        device: Category::ALL
            .into_iter()
            .map(|c| (c, accounts.balance(c, Home::Device).peak_bytes))
            .collect(),
        pool: learner.runtime.take_most().saturating_sub(idle),
        predicted,
    }
}

/// Device bytes in use at the worst moment of an update, what the pool adds left out.
fn predict(decoder: &Decoder, rows: &[Sequence], memory: &MemoryConfig) -> u64 {
    let length = rows[0].tokens.len() as u64;
    let workload = Workload {
        clips: false,
        ..Workload::grpo(
            decoder.arch().clone(),
            [1, length - 1],
            rows.len() as u64,
            1,
        )
    };
    let plan = memory
        .plans(decoder.arch(), false, None, 1)
        .expect("a plan");
    let estimate = estimate(&workload, &plan, &DeviceProfile::assumed(Backend::Wgpu));
    estimate.phase("backward").map_or(0, |phase| {
        let overhead = phase.categories.get(&Category::Overhead);
        phase.total_bytes - overhead.copied().unwrap_or(0)
    })
}

fn main() {
    let device = std::env::args().nth(1).filter(|a| !a.starts_with("--"));
    let on_cpu = device.is_none();
    let (device, info) = open(
        device
            .as_deref()
            .unwrap_or("cpu")
            .parse()
            .expect("a device"),
    )
    .unwrap_or_else(|e| panic!("{e}"));
    let size = if on_cpu { large() } else { small() };
    let Value::Object(config) = &size.config else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(config, Path::new("bench")).expect("a valid architecture");
    let rows = sequences(&size, arch.vocab_size);
    let decoder = Decoder::random(arch, 1, &device);
    println!(
        "{} parameters, {} tokens, {}\n",
        decoder.num_params(),
        size.sequences * size.length,
        info.name
    );
    println!(
        "| plan | parameters | gradients | moments | kept inputs | live graph | {} | time |",
        if on_cpu {
            "peak heap"
        } else {
            "in use, predicted | in use, read"
        }
    );
    println!(
        "|---|---:|---:|---:|---:|---:|---:|---:|{}",
        if on_cpu { "" } else { "---:|" }
    );
    let mut plain = None;
    for (name, turn_on) in TECHNIQUES {
        let mut memory = MemoryConfig::default();
        turn_on(&mut memory);
        let bf16 = memory.moments == MomentKind::Bf16;
        if !on_cpu && bf16 {
            continue;
        }
        let found = measure(&decoder, &rows, &memory, if on_cpu { RUNS } else { 1 });
        let base = *plain.get_or_insert(found.seconds);
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
            if on_cpu {
                mib(found.heap)
            } else {
                format!("{} | {}", mib(found.predicted), mib(found.pool))
            },
        ];
        let time = if on_cpu {
            format!("{:.2}", found.seconds / base)
        } else {
            "-".to_owned()
        };
        println!(
            "| {} | {} | {time} |",
            name.replace("  ", "… "),
            cells.join(" | ")
        );
    }
    if on_cpu {
        head_alone(&decoder);
    }
}

/// The head's memory against `head_rows` and against the number of tokens.
fn head_alone(decoder: &Decoder) {
    let head = decoder.head();
    println!("\n| tokens | head_rows | peak over the weight's gradient and the rows | time |");
    println!("|---:|---:|---:|---:|");
    let hidden_size = decoder.arch().hidden_size;
    let mut first = None;
    for (tokens, head_rows) in [
        (1024, 1024),
        (1024, 256),
        (1024, 64),
        (4096, 256),
        (16_384, 256),
    ] {
        let hidden = burn::tensor::Tensor::<2>::ones([tokens, hidden_size], decoder.device());
        let targets =
            burn::tensor::Tensor::<1, burn::tensor::Int>::zeros([tokens], decoder.device());
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
                let chunk = head.chunk(
                    hidden.clone().narrow(0, start, len),
                    targets.clone().narrow(0, start, len),
                    1.0,
                );
                let ones = chunk.scores.logp.ones_like();
                let found = chunk.backward(&ones, None);
                rows.push(found.hidden);
                let own = found.projection.expect("a trained projection");
                sum = Some(match sum {
                    Some(sum) => sum + own,
                    None => own,
                });
            }
            seconds = seconds.min(started.elapsed().as_secs_f64());
            let weights = 2 * decoder.arch().vocab_size * hidden_size * 4;
            let kept = tokens * hidden_size * 4;
            let heap = heap().map_or(0, |h| h.peak_bytes);
            peak = heap.saturating_sub(before + (weights + kept) as u64);
        }
        let base = *first.get_or_insert(seconds / tokens as f64);
        println!(
            "| {tokens} | {head_rows} | {} | {:.2} |",
            mib(peak),
            seconds / tokens as f64 / base
        );
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}
