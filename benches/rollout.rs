//! Sampling with a small decoder on the CPU: prompts and completions of equal and of different lengths, alone and in groups.
//!
//! `cargo bench --no-default-features --bench rollout [-- FILTER]`; throughput counts new tokens.

#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use criterion::{Criterion, SamplingMode, Throughput};
use firebrick::models::generate::{GenerationRequest, Generator, Sample, SamplingParams};
use firebrick::models::{Decoder, Prepack};
use workload::{VOCAB, prompts, small};

/// Sequences sampled at a time.
const AT_A_TIME: usize = 64;

const PANELS: Prepack = Prepack {
    panels: true,
    quantization: None,
};

/// One case: `n` completions of every prompt.
struct Case<'a> {
    name: &'a str,
    sampling: &'a SamplingParams,
    prompts: &'a [GenerationRequest],
    n: usize,
    prepack: Prepack,
}

impl Case<'_> {
    fn sample(&self, decoder: &Decoder) -> Vec<Sample> {
        Generator::new(decoder, None, self.sampling)
            .and_then(|g| g.prepack(self.prepack).run(self.prompts, self.n, AT_A_TIME))
            .expect("samples")
    }
}

fn rollout(c: &mut Criterion) {
    let decoder = small();
    let fixed = SamplingParams {
        max_new_tokens: 64,
        ..SamplingParams::default()
    };
    let truncated = SamplingParams {
        top_p: 0.9,
        top_k: Some(50),
        ..fixed.clone()
    };
    // a token ends a completion with probability 1/32 or so: most end early, a few are long
    let ragged = SamplingParams {
        max_new_tokens: 256,
        stop_ids: (0..VOCAB as u32).step_by(32).collect(),
        ..SamplingParams::default()
    };
    let same = prompts(64, |_| 64);
    let groups = prompts(8, |_| 64);
    let many = prompts(256, |i| 16 + i * 37 % 96);
    let grouped = prompts(32, |i| 16 + i * 37 % 96);
    let case = |name, sampling, prompts, n| Case {
        name,
        sampling,
        prompts,
        n,
        prepack: Prepack::default(),
    };
    let cases = [
        case("64 prompts of 64, 64 new", &fixed, &same, 1),
        Case {
            prepack: PANELS,
            ..case("64 prompts of 64, 64 new, panels", &fixed, &same, 1)
        },
        case("8 prompts of 64 x 8, 64 new", &fixed, &groups, 8),
        case(
            "64 prompts of 64, 64 new, top-k and top-p",
            &truncated,
            &same,
            1,
        ),
        case("256 prompts of 16 to 111, early ends", &ragged, &many, 1),
        case(
            "32 prompts of 16 to 111 x 8, early ends",
            &ragged,
            &grouped,
            8,
        ),
    ];
    let mut group = c.benchmark_group("rollout");
    group.sampling_mode(SamplingMode::Flat);
    for case in &cases {
        let new: usize = case.sample(&decoder).iter().map(|s| s.tokens.len()).sum();
        group.throughput(Throughput::Elements(new as u64));
        group.bench_function(case.name, |b| b.iter(|| case.sample(&decoder)));
    }
    group.finish();
}

fn main() {
    let mut criterion = settings::criterion();
    rollout(&mut criterion);
    criterion.final_summary();
}
