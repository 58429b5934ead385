//! Updates and scores of a group of completions whose prompt is computed once, against a prompt for each completion, by
//! turns, on the CPU.
//!
//! `cargo bench --no-default-features --bench shared_prefix`
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/results.rs"]
mod results;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use firebrick::backends::memory::MemoryScope;
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Executor, Gradients, Runtime, score_all};
use firebrick::engine::learner::{score_cut, train_cut};
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::plan::{MemoryConfig, ModelPlan};
use firebrick::engine::sequence::Sequence;
use firebrick::models::Decoder;
use firebrick::models::random::Stream;
use results::{Figures, rounded};
use std::time::Instant;
use workload::{VOCAB, small};

/// Tokens of the prompt, and of the longest completion.
const SHAPES: [[usize; 2]; 3] = [[1024, 256], [128, 512], [16, 256]];
const GROUP: usize = 8;
const TURNS: usize = 5;

/// A group of completions, ragged: from half the longest to the longest.
fn group([prompt, response]: [usize; 2]) -> Vec<Sequence> {
    let mut random = Stream::new(3, 0);
    let mut tokens = |count: usize| (0..count).map(|_| random.below(VOCAB as u32)).collect::<Vec<u32>>();
    let shared = tokens(prompt);
    (0..GROUP)
        .map(|i| {
            let completion = tokens(response - i * response / (2 * GROUP));
            let mut sequence = Sequence::completion(&shared, &completion);
            sequence.columns.weight = Some(vec![1e-3; completion.len()]);
            sequence
        })
        .collect()
}

/// Seconds and peak bytes of an update's forward and backward passes.
fn update(decoder: &mut Decoder, sequences: &[Sequence], plan: &ModelPlan) -> [f64; 2] {
    let runtime = Runtime::new(decoder.device());
    let batch = Batch::pack(sequences, train_cut(plan, decoder)).expect("micro-batches");
    let (scope, start) = (MemoryScope::enter(decoder.device()), Instant::now());
    let mut gradients = Gradients::new(decoder.specs().count());
    Executor::new(plan, &runtime, 1.0)
        .backward(decoder, &batch.micros(), &Nll, &mut gradients, None)
        .expect("a backward pass");
    let seconds = start.elapsed().as_secs_f64();
    let memory = scope.finish();
    [seconds, (memory.peak_bytes - memory.before_bytes) as f64]
}

/// Seconds of log-probs.
fn score(decoder: &Decoder, sequences: &[Sequence], plan: &ModelPlan) -> f64 {
    let runtime = Runtime::new(decoder.device());
    let executor = Executor::new(plan, &runtime, 1.0);
    let start = Instant::now();
    score_all(&executor, decoder, sequences, score_cut(plan, decoder)).expect("scores");
    start.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    allocator::as_in_the_program();
    let mut decoder = small();
    let mut rows = Vec::new();
    for shape in SHAPES {
        let sequences = group(shape);
        let plans = [true, false].map(|share_prefix| {
            let memory = MemoryConfig { share_prefix, ..MemoryConfig::default() };
            memory.plan(decoder.arch()).expect("a plan")
        });
        let mut figures = [const { Vec::new() }; 6];
        for turn in 0..=TURNS {
            for (side, plan) in plans.iter().enumerate() {
                let [seconds, peak] = update(&mut decoder, &sequences, plan);
                let scoring = score(&decoder, &sequences, plan);
                // the first turn warms caches
                if turn > 0 {
                    for (figure, value) in [seconds, peak, scoring].into_iter().enumerate() {
                        figures[2 * figure + side].push(value);
                    }
                }
            }
        }
        let [shared, repeated, peak, repeated_peak, scoring, repeated_scoring] = figures.map(median);
        println!(
            "prompt {}, completions of {}: update {:.2} times as fast, its peak {:.2}, scoring {:.2} times",
            shape[0],
            shape[1],
            repeated / shared,
            peak / repeated_peak,
            repeated_scoring / scoring
        );
        rows.push(vec![
            format!("{} + {}", shape[0], shape[1]).into(),
            rounded(repeated / shared, 2),
            rounded(peak / repeated_peak, 2),
            rounded(repeated_scoring / scoring, 2),
        ]);
    }
    Figures {
        bench: "shared_prefix",
        title: "A group's prompt computed once",
        command: "cargo bench --no-default-features --bench shared_prefix",
        what: "A llama of 6.5 M parameters, 8 completions of half to all of the longest length, by turns with `memory.share_prefix: false`.",
        columns: &["prompt + longest completion", "update, times as fast", "peak of the update", "scoring, times as fast"],
        rows,
    }
    .write();
}
