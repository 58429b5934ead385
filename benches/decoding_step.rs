//! Where the time of a decoding step on the CPU goes, by rows: sequences of 64 tokens and more, weights in panels.
//!
//! `cargo bench --no-default-features --bench decoding_step` prints milliseconds of a step, medians over its steps, by
//! family of kernels; what is no kernel's is the host's work between them. Arguments choose the numbers of rows.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/results.rs"]
mod results;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use firebrick::backends::trace;
use firebrick::models::{Decoder, Prepack};
use firebrick::sampler::{Generator, SamplingParams, SchedulerConfig};
use results::{Figures, rounded};
use workload::prompts;

const FAMILIES: [&str; 4] = ["product", "decode attention", "norm", "draw"];

const PANELS: Prepack = Prepack { panels: true, quantization: None };

/// Runs of which the fastest counts.
const RUNS: usize = 5;

/// New tokens of each sequence.
const NEW: usize = 65;

/// Milliseconds of a step, and of each family of kernels in it.
fn step(decoder: &Decoder, rows: usize) -> Vec<f64> {
    let sampling = SamplingParams { max_new_tokens: NEW, ..SamplingParams::default() };
    let requests = prompts(rows, |_| 32);
    let once = || {
        let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
        let generator = generator.prepack(PANELS);
        trace::record();
        let generated = generator.run_with(&requests, 1, &SchedulerConfig::new(rows), |_| {}).expect("samples");
        let spans = trace::finish();
        let stats = generated.stats;
        let steps = stats.decode_steps as f64;
        let mut all = vec![1e3 * stats.decode_time.as_secs_f64() / steps];
        // the prompts' products are left out: they are before the first draw
        let prompt = spans.iter().position(|span| span.name == "draw").map_or(0, |at| at + 1);
        for family in FAMILIES {
            let own = spans[prompt..].iter().filter(|span| span.name == family);
            all.push(1e3 * own.map(|span| span.seconds).sum::<f64>() / steps);
        }
        all.push(all[0] - all[1..].iter().sum::<f64>());
        all
    };
    (0..RUNS).map(|_| once()).min_by(|a, b| a[0].total_cmp(&b[0])).expect("a run")
}

fn main() {
    allocator::as_in_the_program();
    let chosen = std::env::args().skip(1).filter_map(|arg| arg.parse().ok());
    let mut rows: Vec<usize> = chosen.collect();
    if rows.is_empty() {
        rows = vec![1, 2, 3, 4, 6, 8, 10, 13, 16, 24, 32, 48, 64];
    }
    let decoder = workload::small();
    println!("| rows | ms | products | attention | norms | draws | else |\n|---:|---:|---:|---:|---:|---:|---:|");
    let mut figures = Vec::new();
    for rows in rows {
        let parts = step(&decoder, rows);
        figures.push(std::iter::once(rows.into()).chain(parts.iter().map(|ms| rounded(*ms, 2))).collect());
        let parts: Vec<String> = parts.iter().map(|ms| format!("{ms:.3}")).collect();
        println!("| {rows} | {} |", parts.join(" | "));
    }
    Figures {
        bench: "decoding_step",
        title: "A decoding step on a CPU",
        command: "cargo bench --no-default-features --bench decoding_step",
        what: "A decoder of 6.5 M parameters, sequences of 32 to 97 tokens, packed weights; the fastest of five runs.",
        columns: &["sequences", "step, ms", "matmuls, ms", "attention, ms", "norms, ms", "draws, ms", "rest, ms"],
        rows: figures,
    }
    .write();
}
