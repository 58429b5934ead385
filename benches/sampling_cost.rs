//! Seconds of sampling on the CPU by new tokens and by sequences at a time, as the tables and the plot of
//! BENCHMARKS.md.
//!
//! `cargo bench --no-default-features --bench sampling_cost` prints the tables and writes `docs/sampling.svg`.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/plot.rs"]
mod plot;
#[path = "support/results.rs"]
mod results;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use firebrick::models::{Decoder, Prepack};
use firebrick::sampler::{Generator, SamplingParams};
use plot::{COLOURS, Chart, Line};
use results::{Figures, rounded};
use std::path::Path;
use std::time::Instant;
use workload::{VOCAB, prompts};

const RUNS: usize = 3;

/// Runs of what is compared by turns.
const TURNS: usize = 15;

const COMMAND: &str = "cargo bench --no-default-features --bench sampling_cost";

const PANELS: Prepack = Prepack { panels: true, quantization: None };

/// Seconds that it takes to sample, the median over `RUNS` after one run that does not count.
fn seconds(decoder: &Decoder, sequences: usize, new: usize) -> f64 {
    let sampling = SamplingParams { max_new_tokens: new, ..SamplingParams::default() };
    let requests = prompts(sequences, |_| 32);
    let once = || {
        let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
        let started = Instant::now();
        generator.prepack(PANELS).run(&requests, 1, sequences).expect("samples");
        started.elapsed().as_secs_f64()
    };
    let mut all: Vec<f64> = (0..=RUNS).map(|_| once()).skip(1).collect();
    all.sort_by(f64::total_cmp);
    all[RUNS / 2]
}

/// Seconds a thousand tokens of 64 completions of 8 prompts of 8 to 64 tokens, by turns, the medians: a token ends a
/// completion with a chance of 1/64, at most 256; and as many tokens of completions that all end together.
fn by_lengths(decoder: &Decoder) -> [f64; 2] {
    let requests = prompts(8, |i| 8 + i * 37 % 57);
    let once = |sampling: &SamplingParams| {
        let generator = Generator::new(decoder, None, sampling).expect("valid settings");
        let started = Instant::now();
        let generated = generator.prepack(PANELS).run(&requests, 8, 64);
        let seconds = started.elapsed().as_secs_f64();
        let samples = generated.expect("samples");
        let tokens: usize = samples.iter().map(|sample| sample.tokens.len()).sum();
        (tokens, 1e3 * seconds / tokens as f64)
    };
    let different = SamplingParams {
        max_new_tokens: 256,
        stop_ids: (0..VOCAB as u32).step_by(64).collect(),
        ..SamplingParams::default()
    };
    let (tokens, _) = once(&different);
    let together =
        SamplingParams { max_new_tokens: (tokens as f64 / 64.0).round() as usize, ..SamplingParams::default() };
    let mut all = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        all[0].push(once(&different).1);
        all[1].push(once(&together).1);
    }
    all.map(|mut seconds| {
        seconds.sort_by(f64::total_cmp);
        seconds[TURNS / 2]
    })
}

fn main() {
    allocator::as_in_the_program();
    let decoder = &workload::small();
    let [different, together] = by_lengths(decoder);
    println!(
        "64 completions of different lengths: {different:.3} s a thousand tokens; that end together: {together:.3}; ratio {:.2}\n",
        different / together
    );
    let by_tokens = [32, 64, 128, 256, 512, 1024].map(|new| (new, seconds(decoder, 16, new)));
    let by_sequences = [1, 2, 4, 8, 16, 32, 64, 128].map(|n| (n, seconds(decoder, n, 64)));
    println!("| new tokens, of 16 sequences | seconds | ms a token of all 16 |\n|---:|---:|---:|");
    for (new, seconds) in by_tokens {
        println!("| {new} | {seconds:.3} | {:.2} |", 1e3 * seconds / new as f64);
    }
    println!("\n| sequences at a time, 64 new tokens each | seconds | tokens/s |\n|---:|---:|---:|");
    for (n, seconds) in by_sequences {
        println!("| {n} | {seconds:.3} | {:.0} |", (n * 64) as f64 / seconds);
    }
    write([different, together], &by_tokens, &by_sequences);
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
            lines: vec![Line { name: None, colour, points: points.iter().map(|&(x, y)| (x as f64, y)).collect() }],
        }
    };
    let picture = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/sampling.svg");
    let charts = [
        chart("16 sequences", "new tokens of each", &by_tokens, COLOURS[0]),
        chart("64 new tokens each", "sequences at a time", &by_sequences, COLOURS[1]),
    ];
    plot::draw(&picture, &charts);
}

/// Writes the figures, if that is asked for.
fn write([different, together]: [f64; 2], by_tokens: &[(usize, f64)], by_sequences: &[(usize, f64)]) {
    Figures {
        bench: "sampling_ragged",
        title: "Sampling of different lengths",
        command: COMMAND,
        what: "64 completions of 8 prompts on a CPU, which end by chance at 63 tokens on average, compared with as many \
               tokens in completions of one length.",
        columns: &["case", "different, s per 1,000 tokens", "equal, s per 1,000 tokens", "ratio"],
        rows: vec![vec![
            "8 prompts × 8".into(),
            rounded(different, 3),
            rounded(together, 3),
            rounded(different / together, 2),
        ]],
    }
    .write();
    let row =
        |&(new, seconds): &(usize, f64)| vec![new.into(), rounded(seconds, 3), rounded(1e3 * seconds / new as f64, 2)];
    Figures {
        bench: "sampling_by_length",
        title: "Sampling by new tokens",
        command: COMMAND,
        what: "A decoder of 6.5 M parameters on a CPU, 16 sequences, prompts of 32 tokens, packed weights; medians of \
               three.",
        columns: &["new tokens", "time, s", "ms per token"],
        rows: by_tokens.iter().map(row).collect(),
    }
    .write();
    let row = |&(sequences, seconds): &(usize, f64)| {
        vec![sequences.into(), rounded(seconds, 3), rounded((sequences * 64) as f64 / seconds, 0)]
    };
    Figures {
        bench: "sampling_by_batch",
        title: "Sampling by sequences at a time",
        command: COMMAND,
        what: "A decoder of 6.5 M parameters on a CPU, 64 new tokens per sequence.",
        columns: &["sequences", "time, s", "tokens/s"],
        rows: by_sequences.iter().map(row).collect(),
    }
    .write();
}
