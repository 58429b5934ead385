//! How many sequences of long-tailed lengths a KV cache of fixed bytes holds: a count, which does not depend on the
//! machine's load.
//!
//! `cargo bench --no-default-features --bench kv_capacity` prints a row of BENCHMARKS.md for each case.
#![allow(clippy::print_stdout, reason = "a bench prints what it counted")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/results.rs"]
mod results;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use firebrick::sampler::{GenerationRequest, Generator, SamplingParams, SchedulerConfig};
use results::{Figures, rounded};
use workload::{arithmetic, long_tailed, prompts};

/// Completions of a case.
const COMPLETIONS: usize = 256;

/// Most sequences at a time: more than the bytes below hold.
const SLOTS: usize = 128;

/// Most tokens of a completion: the model has a context of 2,048, and prompts have up to 256.
const NEW: usize = 1792;

/// Bytes of the cache: 1,536 a token of this model.
const BYTES: usize = 16 << 20;

/// Completions of log-normal lengths (median 250, sigma 0.8, at most [`NEW`]), `group` of them of one prompt. No two
/// prompts begin alike.
fn requests(vocab: usize, group: usize, prompt: impl Fn(usize) -> usize) -> Vec<GenerationRequest> {
    let token = |prompt: usize, at: usize| {
        let mixed = ((prompt << 16 | at) as u32).wrapping_mul(2_654_435_761) >> 12;
        mixed % vocab as u32
    };
    let prompts = prompts(COMPLETIONS / group, prompt);
    let requests = prompts.iter().enumerate().flat_map(|(index, prompt)| {
        (0..group).map(move |member| {
            let mut request = prompt.clone();
            request.tokens = (0..prompt.tokens.len()).map(|at| token(index, at)).collect();
            request.key.sample = member as u32;
            request
        })
    });
    let mut requests: Vec<_> = requests.collect();
    for (request, length) in requests.iter_mut().zip(long_tailed(COMPLETIONS)) {
        request.max_new_tokens = Some(length.min(NEW));
    }
    requests
}

fn main() {
    allocator::as_in_the_program();
    let decoder = arithmetic();
    let sampling = SamplingParams { max_new_tokens: NEW, ..SamplingParams::default() };
    let config = SchedulerConfig { kv_cache_bytes: Some(BYTES), ..SchedulerConfig::new(SLOTS) };
    let vocab = decoder.arch().vocab_size;
    let cases = [
        ("256 prompts of 8 to 64 tokens", requests(vocab, 1, |i| 8 + i * 37 % 57)),
        ("16 prompts of 256 tokens × 16", requests(vocab, 16, |_| 256)),
    ];
    println!("| completions | sequences at a time | preempted | waste |\n|---|---:|---:|---:|");
    let mut rows = Vec::new();
    for (name, requests) in cases {
        let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
        let generated = generator.run_with(&requests, 1, &config, |_| {});
        let stats = generated.expect("samples").stats;
        let at_a_time = stats.occupied as f64 / stats.decode_steps as f64;
        let (preemptions, waste) = (stats.preemptions, 100.0 * stats.kv_waste());
        println!("| {name} | {at_a_time:.1} | {preemptions} | {waste:.1} % |");
        rows.push(vec![name.into(), rounded(at_a_time, 1), preemptions.into(), rounded(waste, 1)]);
    }
    Figures {
        bench: "kv_capacity",
        title: "Capacity of the KV cache",
        command: "cargo bench --no-default-features --bench kv_capacity",
        what: "256 completions of log-normal lengths (median 250, at most 1,792) in 10,922 tokens; waste is the empty end \
               of last blocks.",
        columns: &["completions", "sequences at a time", "preemptions", "waste, %"],
        rows,
    }
    .write();
}
