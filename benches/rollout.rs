//! Sampling on the CPU: uniform and long-tailed lengths, and what it costs by tokens and by sequences at a time.
//!
//! `cargo bench --no-default-features --bench rollout [-- --plot]`: with `--plot` the costs alone, which go to
//! `docs/sampling.svg` too.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/plot.rs"]
mod plot;

use firebrick::backends::DeviceSpec;
use firebrick::backends::device::open;
use firebrick::models::generate::{GenerationRequest, Generator, Sample, SamplingParams};
use firebrick::models::random::DrawKey;
use firebrick::models::{Arch, Decoder, Prepack};
use plot::{COLOURS, Chart, Line};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

const VOCAB: usize = 4096;
const RUNS: usize = 3;

const PANELS: Prepack = Prepack {
    panels: true,
    quantization: None,
};

fn decoder() -> Decoder {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("bench")).expect("a valid architecture");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    Decoder::random(arch, 1, &device)
}

fn requests(count: usize, lengths: impl Fn(usize) -> usize) -> Vec<GenerationRequest> {
    let tokens =
        |salt: usize| (0..lengths(salt)).map(move |i| ((i * 7919 + salt * 104_729) % VOCAB) as u32);
    (0..count)
        .map(|i| GenerationRequest {
            tokens: tokens(i).collect(),
            key: DrawKey {
                seed: 1,
                step: 0,
                prompt_index: i as u32,
                sample: 0,
            },
        })
        .collect()
}

/// Median over `RUNS` of the new tokens a second, after one run that does not count.
fn measure(name: &str, work: impl Fn() -> Vec<Sample>) {
    let new = |samples: &[Sample]| samples.iter().map(|s| s.tokens.len()).sum::<usize>();
    let tokens = new(&work());
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
        "{name:<56} {tokens:>6} tokens {:>9.1} ms {:>9.0} tokens/s",
        median * 1e3,
        tokens as f64 / median
    );
}

/// Seconds that it takes to sample, the median over `RUNS` after one run that does not count.
fn seconds(decoder: &Decoder, sequences: usize, new: usize) -> f64 {
    let sampling = SamplingParams {
        max_new_tokens: new,
        ..SamplingParams::default()
    };
    let requests = requests(sequences, |_| 32);
    let once = || {
        let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
        let started = Instant::now();
        generator
            .prepack(PANELS)
            .run(&requests, 1, sequences)
            .expect("samples");
        started.elapsed().as_secs_f64()
    };
    let mut all: Vec<f64> = (0..=RUNS).map(|_| once()).skip(1).collect();
    all.sort_by(f64::total_cmp);
    all[RUNS / 2]
}

/// What sampling costs by new tokens and by sequences at a time: a table, and a plot.
fn costs(decoder: &Decoder) {
    let by_tokens = [32, 64, 128, 256, 512, 1024].map(|new| (new, seconds(decoder, 16, new)));
    let by_sequences = [1, 2, 4, 8, 16, 32, 64, 128].map(|n| (n, seconds(decoder, n, 64)));
    println!("| new tokens, of 16 sequences | seconds | ms a token of all 16 |\n|---:|---:|---:|");
    for (new, seconds) in by_tokens {
        println!(
            "| {new} | {seconds:.3} | {:.2} |",
            1e3 * seconds / new as f64
        );
    }
    println!(
        "\n| sequences at a time, 64 new tokens each | seconds | tokens/s |\n|---:|---:|---:|"
    );
    for (n, seconds) in by_sequences {
        println!("| {n} | {seconds:.3} | {:.0} |", (n * 64) as f64 / seconds);
    }
    let chart = |title, x, points: &[(usize, f64)], colour| {
        let most = points.iter().map(|p| p.1).fold(0.0, f64::max);
        let last = points.last().expect("points").0;
        Chart {
            title,
            x,
            y: "seconds",
            ends: (last as f64, 1.05 * most),
            ordinate: |seconds| format!("{seconds:.1}"),
            mark: None,
            lines: vec![Line {
                name: None,
                colour,
                points: points.iter().map(|&(x, y)| (x as f64, y)).collect(),
            }],
        }
    };
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/sampling.svg");
    let charts = [
        chart("16 sequences", "new tokens of each", &by_tokens, COLOURS[0]),
        chart(
            "64 new tokens each",
            "sequences at a time",
            &by_sequences,
            COLOURS[1],
        ),
    ];
    plot::draw(&picture, &charts);
}

fn main() {
    let decoder = decoder();
    if std::env::args().any(|a| a == "--plot") {
        return costs(&decoder);
    }
    let uniform = SamplingParams {
        max_new_tokens: 64,
        ..SamplingParams::default()
    };
    // each draw ends a completion with probability 1/32: geometric lengths
    let ragged = SamplingParams {
        max_new_tokens: 256,
        stop_ids: (0..VOCAB as u32).step_by(32).collect(),
        ..SamplingParams::default()
    };
    let truncated = SamplingParams {
        top_p: 0.9,
        top_k: Some(50),
        ..uniform.clone()
    };
    let run = |sampling: &SamplingParams, requests: &[GenerationRequest], n, seqs| {
        Generator::new(&decoder, None, sampling)
            .and_then(|g| g.run(requests, n, seqs))
            .expect("samples")
    };
    let same = requests(64, |_| 64);
    measure("64 sequences, 64 + 64", || run(&uniform, &same, 1, 64));
    let groups = requests(8, |_| 64);
    measure("8 prompts x 8, 64 + 64", || run(&uniform, &groups, 8, 64));
    measure("64 sequences, 64 + 64, top-k and top-p", || {
        run(&truncated, &same, 1, 64)
    });
    let many = requests(256, |i| 16 + i * 37 % 96);
    measure("256 sequences, 16..112 + geometric, 64 at a time", || {
        run(&ragged, &many, 1, 64)
    });
    let grouped = requests(32, |i| 16 + i * 37 % 96);
    measure("32 prompts x 8, the same", || run(&ragged, &grouped, 8, 64));
}
