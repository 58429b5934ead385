//! SamplingParams and one optimizer step of a small decoder on the CPU.
//!
//! `cargo bench --no-default-features --bench step`
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::engine::executor::{Executor, Gradients, Runtime};
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, ModelPlan};
use firebrick::engine::sequence::{Sequence, TokenColumns};
use firebrick::models::generate::{GenerationRequest, Generator, SamplingParams};
use firebrick::models::random::DrawKey;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

const SEQUENCES: usize = 8;
const LENGTH: usize = 128;
const PROMPTS: usize = 4;
const SAMPLES: usize = 8;
const NEW_TOKENS: usize = 32;
const RUNS: usize = 7;

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
    (0..len)
        .map(|i| ((i * 7919 + salt * 104_729) % 4096) as u32)
        .collect()
}

/// Median over `RUNS` of the tokens a second of `work`, after one run that does not count.
fn measure(name: &str, tokens: usize, mut work: impl FnMut()) {
    work();
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[RUNS / 2];
    println!(
        "{name:<56} {:>9.1} ms {:>9.0} tokens/s",
        median * 1e3,
        tokens as f64 / median
    );
}

fn backward(decoder: &mut Decoder) {
    let sequences: Vec<Sequence> = (0..SEQUENCES)
        .map(|i| Sequence {
            tokens: tokens(LENGTH, i),
            positions: (0..LENGTH - 1).collect(),
            columns: TokenColumns {
                weight: Some(vec![1e-3; LENGTH - 1]),
                ..TokenColumns::default()
            },
            ..Sequence::default()
        })
        .collect();
    let micros = vec![sequences.iter().collect()];
    let runtime = Runtime::new(decoder.device());
    let memory = MemoryConfig::default();
    let plans = [
        ("plain", ModelPlan::plain(decoder.arch(), &memory)),
        (
            "every layer checkpointed",
            ModelPlan::checkpoint_every(decoder.arch(), &memory, 1),
        ),
    ];
    for (name, plan) in plans {
        let name = format!("forward and backward, {SEQUENCES} x {LENGTH}, {name}");
        measure(&name, SEQUENCES * LENGTH, || {
            let mut gradients = Gradients::new(decoder.specs().count());
            Executor::new(&plan, &runtime, 1.0)
                .backward(decoder, &micros, &Nll, &mut gradients, None)
                .expect("a backward pass");
        });
    }
}

fn sampling(decoder: &Decoder) {
    let sampling = SamplingParams {
        max_new_tokens: NEW_TOKENS,
        ..SamplingParams::default()
    };
    let requests: Vec<GenerationRequest> = (0..PROMPTS)
        .map(|i| GenerationRequest {
            tokens: tokens(32, i),
            key: DrawKey {
                seed: 1,
                step: 0,
                prompt_index: i as u32,
                sample: 0,
            },
        })
        .collect();
    let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
    let name = format!("sampling, {PROMPTS} prompts x {SAMPLES}, {NEW_TOKENS} new tokens");
    measure(&name, PROMPTS * SAMPLES * NEW_TOKENS, || {
        generator
            .run(&requests, SAMPLES, PROMPTS * SAMPLES)
            .expect("samples");
    });
}

fn main() {
    let mut decoder = decoder();
    backward(&mut decoder);
    sampling(&decoder);
}
