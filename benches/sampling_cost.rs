//! Seconds of sampling on the CPU by new tokens and by sequences at a time, as the tables and the plot of BENCHMARKS.md.
//!
//! `cargo bench --no-default-features --bench sampling_cost` prints the tables and writes `docs/sampling.svg`.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/plot.rs"]
mod plot;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use firebrick::models::generate::{Generator, SamplingParams};
use firebrick::models::{Decoder, Prepack};
use plot::{COLOURS, Chart, Line};
use std::path::Path;
use std::time::Instant;
use workload::prompts;

const RUNS: usize = 3;

const PANELS: Prepack = Prepack {
    panels: true,
    quantization: None,
};

/// Seconds that it takes to sample, the median over `RUNS` after one run that does not count.
fn seconds(decoder: &Decoder, sequences: usize, new: usize) -> f64 {
    let sampling = SamplingParams {
        max_new_tokens: new,
        ..SamplingParams::default()
    };
    let requests = prompts(sequences, |_| 32);
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

fn main() {
    let decoder = &workload::small();
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
