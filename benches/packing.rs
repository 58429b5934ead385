//! An update over packed rows against one over padded rows, on the CPU, for sequences of the lengths that two tasks have.
//!
//! `cargo bench --no-default-features --bench packing`
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::engine::batch::{Batch, grouping};
use firebrick::engine::executor::{Executor, Gradients, Runtime};
use firebrick::engine::learner::train_cut;
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, Packing};
use firebrick::engine::sequence::Sequence;
use firebrick::models::random::Stream;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

const RUNS: usize = 5;

fn decoder(config: Value) -> Decoder {
    let Value::Object(config) = config else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("bench")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

/// The model of `examples/arithmetic.yaml`.
fn arithmetic() -> Decoder {
    decoder(json!({
        "model_type": "qwen3", "vocab_size": 16, "hidden_size": 128, "intermediate_size": 384,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
    }))
}

/// 6.5 million parameters.
fn small() -> Decoder {
    decoder(json!({
        "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4
    }))
}

/// Sequences whose second half is scored.
fn sequences(lengths: impl Iterator<Item = usize>, vocab: usize) -> Vec<Sequence> {
    lengths
        .enumerate()
        .map(|(salt, n)| {
            let token = |i: usize| ((i * 7919 + salt * 104_729) % vocab) as u32;
            let tokens: Vec<u32> = (0..n).map(token).collect();
            let mut sequence = Sequence::completion(&tokens[..n / 2], &tokens[n / 2..]);
            sequence.columns.weight = Some(vec![1e-3; n - n / 2]);
            sequence
        })
        .collect()
}

/// Prompt and completion of grade-school word problems: log-normal, 250 tokens in the middle, a tenth above 400.
fn word_problems(count: usize) -> impl Iterator<Item = usize> {
    let mut random = Stream::new(1, 0);
    (0..count).map(move |_| {
        let length = (5.5 + 0.38 * f64::from(random.normal())).exp().round();
        length.clamp(60.0, 1024.0) as usize
    })
}

/// Seconds of forward and backward over all micro-batches under each layout, in turns: the median run of each.
fn compare(name: &str, decoder: &mut Decoder, sequences: &[Sequence], memory: &MemoryConfig) {
    let plans = [Packing::Padded, Packing::Packed].map(|packing| {
        let memory = MemoryConfig {
            packing,
            ..memory.clone()
        };
        memory.plan(decoder.arch()).expect("a plan")
    });
    let runtime = Runtime::new(decoder.device());
    let mut seconds = [Vec::new(), Vec::new()];
    let mut norms = Vec::new();
    for run in 0..=RUNS {
        for (plan, seconds) in plans.iter().zip(&mut seconds) {
            let cut = train_cut(plan, decoder.arch());
            let started = Instant::now();
            let batch = Batch::pack(sequences, cut).expect("micro-batches");
            let mut gradients = Gradients::new(decoder.specs().count());
            Executor::new(plan, &runtime, 1.0)
                .backward(decoder, &batch.micros(), &Nll, &mut gradients, None)
                .expect("a backward pass");
            let elapsed = started.elapsed().as_secs_f64();
            norms.push(gradients.global_norm().expect("a norm"));
            // the first run does not count
            if run > 0 {
                seconds.push(elapsed);
            }
        }
    }
    let same = |norm: &f64| (norm / norms[0] - 1.0).abs() < 1e-4;
    assert!(norms.iter().all(same), "the layouts disagree: {norms:?}");
    let [padded, packed] = seconds.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[RUNS / 2]
    });
    let stats = plans.map(|plan| {
        let cut = train_cut(&plan, decoder.arch());
        let batch = Batch::pack(sequences, cut).expect("micro-batches");
        batch.stats(grouping(plan.attention_rows, decoder.device()))
    });
    let [of_padded, of_packed] = stats;
    println!(
        "{name:<52} padded {:>8.1} ms ({:>4.1} % padding, {} micro-batches), packed {:>8.1} ms ({}): {:.2} times as fast",
        padded * 1e3,
        100.0 * of_padded.padding(),
        of_padded.micro_batches,
        packed * 1e3,
        of_packed.micro_batches,
        padded / packed
    );
}

fn main() {
    let budget = |train_tokens| MemoryConfig {
        train_tokens,
        ..MemoryConfig::default()
    };
    let mut model = arithmetic();
    let mut random = Stream::new(2, 0);
    let equal = sequences(std::iter::repeat_n(10, 768), 16);
    let spread = sequences((0..768).map(|_| 6 + random.below(15) as usize), 16);
    compare("arithmetic, 768 of 10", &mut model, &equal, &budget(16_384));
    compare(
        "arithmetic, 768 of 6 to 20",
        &mut model,
        &spread,
        &budget(16_384),
    );
    compare(
        "arithmetic, 768 of 6 to 20, 1,024 at a time",
        &mut model,
        &spread,
        &budget(1024),
    );

    let mut model = small();
    let words = sequences(word_problems(32), 4096);
    compare(
        "256 x 6, 32 word problems",
        &mut model,
        &words,
        &budget(16_384),
    );
    compare(
        "256 x 6, 32 word problems, 4,096 at a time",
        &mut model,
        &words,
        &budget(4096),
    );
    compare(
        "256 x 6, 32 word problems, 1,024 at a time",
        &mut model,
        &words,
        &budget(1024),
    );
    let checkpointed = MemoryConfig {
        gradient_checkpointing: true,
        ..budget(4096)
    };
    compare(
        "256 x 6, 32 word problems, checkpointed, 4,096",
        &mut model,
        &words,
        &checkpointed,
    );
}
