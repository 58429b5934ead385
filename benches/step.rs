//! Sampling and one optimizer step of a small decoder on the CPU.
//!
//! `cargo bench --no-default-features --bench step`
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::engine::batch::{MicroBatch, Sequence};
use firebrick::engine::gradients::Gradients;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, ModelPlan};
use firebrick::engine::schedule::Schedule;
use firebrick::models::generate::{Generator, Request, Sampling};
use firebrick::models::random::DrawKey;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;

const SEQUENCES: usize = 8;
const LENGTH: usize = 128;

fn decoder() -> Decoder {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("bench")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

fn tokens(len: usize, salt: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729) % 4096) as u32).collect()
}

fn backward(c: &mut Criterion) {
    let decoder = decoder();
    let sequences: Vec<Sequence> = (0..SEQUENCES)
        .map(|i| Sequence {
            tokens: tokens(LENGTH, i),
            positions: (0..LENGTH - 1).collect(),
            weights: vec![1e-3; LENGTH - 1],
            ..Sequence::default()
        })
        .collect();
    let own: Vec<&Sequence> = sequences.iter().collect();
    let micro = MicroBatch::new(decoder.arch(), &own, decoder.device());
    let memory = MemoryConfig::default();
    let plans = [
        ("plain", ModelPlan::plain(decoder.arch(), &memory)),
        ("every layer checkpointed", ModelPlan::checkpoint_every(decoder.arch(), &memory, 1)),
    ];
    let mut group = c.benchmark_group("forward and backward, 8 x 128 tokens");
    group.sample_size(10).throughput(Throughput::Elements((SEQUENCES * LENGTH) as u64));
    for (name, plan) in plans {
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut gradients = Gradients::new(decoder.specs().count());
                let schedule = Schedule::new(&decoder, &plan, 1.0);
                schedule.backward(&micro, &Nll, &mut gradients).expect("a backward pass")
            });
        });
    }
    group.finish();
}

fn sampling(c: &mut Criterion) {
    let decoder = decoder();
    let sampling = Sampling { max_new_tokens: 32, ..Sampling::default() };
    let requests: Vec<Request> = (0..4)
        .map(|i| Request {
            tokens: tokens(32, i),
            key: DrawKey { seed: 1, step: 0, draw: i as u32, sample: 0 },
        })
        .collect();
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let mut group = c.benchmark_group("sampling, 4 prompts x 8, 32 new tokens");
    group.sample_size(10).throughput(Throughput::Elements(4 * 8 * 32));
    group.bench_function("temperature 1", |b| b.iter(|| generator.run(&requests, 8, 32).expect("samples")));
    group.finish();
}

criterion_group!(benches, backward, sampling);
criterion_main!(benches);
