//! Sampling on the CPU: prompts and completions of equal and of different lengths, alone and in groups.
//!
//! `cargo bench --no-default-features --bench rollout [-- FILTER]`; throughput counts new tokens. A case whose
//! completions end at different lengths is followed by one with as many tokens of which all end together: the
//! throughput of the second over that of the first is what different lengths cost a token. `FIREBRICK_BENCH_REAL=1`
//! adds the shape of a 0.5B model.

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;
#[path = "support/workload.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod workload;

use criterion::{Criterion, SamplingMode, Throughput};
use firebrick::models::{Decoder, KvCacheDtype, Prepack};
use firebrick::sampler::{Generated, GenerationRequest, Generator, Sample, SamplingParams, SchedulerConfig};
use workload::{VOCAB, long_tailed, prompts, small};

/// Sequences sampled at a time.
const AT_A_TIME: usize = 64;

const PANELS: Prepack = Prepack { panels: true, quantization: None };

/// One case: `n` completions of every prompt, `at_a_time` of them at a time.
struct Case<'a> {
    name: &'a str,
    sampling: SamplingParams,
    prompts: &'a [GenerationRequest],
    n: usize,
    at_a_time: usize,
    prepack: Prepack,
    dtype: KvCacheDtype,
    /// Whether decoding alone is measured, without prompts.
    decoding: bool,
}

impl<'a> Case<'a> {
    fn new(name: &'a str, sampling: &SamplingParams, prompts: &'a [GenerationRequest], n: usize) -> Self {
        Self {
            name,
            sampling: sampling.clone(),
            prompts,
            n,
            at_a_time: AT_A_TIME,
            prepack: Prepack::default(),
            dtype: KvCacheDtype::Auto,
            decoding: false,
        }
    }

    fn sample(&self, decoder: &Decoder) -> Generated {
        let config = SchedulerConfig { kv_cache_dtype: self.dtype, ..SchedulerConfig::new(self.at_a_time) };
        let generator = Generator::new(decoder, None, &self.sampling).expect("valid settings");
        let generator = generator.prepack(self.prepack);
        let generated = generator.run_with(self.prompts, self.n, &config, |_| {});
        generated.expect("samples")
    }

    /// The tokens that a measurement of this case counts: all, or those that follow the first, which prompts give.
    fn counted(&self, generated: &Generated) -> usize {
        let first = if self.decoding { generated.samples.len() } else { 0 };
        new_tokens(&generated.samples) - first
    }
}

/// Measures cases, in groups of criterion's that begin with `group`.
fn measure(c: &mut Criterion, group: &str, decoder: &Decoder, cases: &[Case]) {
    let mut group = c.benchmark_group(group);
    group.sampling_mode(SamplingMode::Flat);
    for case in cases {
        let new = case.counted(&case.sample(decoder));
        group.throughput(Throughput::Elements(new as u64));
        group.bench_function(case.name, |b| {
            if case.decoding {
                let decode = |_| case.sample(decoder).stats.decode_time;
                b.iter_custom(|iterations| (0..iterations).map(decode).sum());
            } else {
                b.iter(|| case.sample(decoder));
            }
        });
    }
    group.finish();
}

fn new_tokens(samples: &[Sample]) -> usize {
    samples.iter().map(|s| s.tokens.len()).sum()
}

fn rollout(c: &mut Criterion, decoder: &Decoder) {
    let fixed = SamplingParams { max_new_tokens: 64, ..SamplingParams::default() };
    let truncated = SamplingParams { top_p: 0.9, top_k: Some(50), ..fixed.clone() };
    // a token ends a completion with probability 1/32 or so: most end early, a few are long
    let ragged = ending(32, 256);
    let same = prompts(64, |_| 64);
    let groups = prompts(8, |_| 64);
    let many = prompts(256, |i| 16 + i * 37 % 96);
    let grouped = prompts(32, |i| 16 + i * 37 % 96);
    let cases = [
        Case::new("64 prompts of 64, 64 new", &fixed, &same, 1),
        Case { prepack: PANELS, ..Case::new("64 prompts of 64, 64 new, panels", &fixed, &same, 1) },
        Case::new("8 prompts of 64 x 8, 64 new", &fixed, &groups, 8),
        Case::new("64 prompts of 64, 64 new, top-k and top-p", &truncated, &same, 1),
        Case::new("256 prompts of 16 to 111, early ends", &ragged, &many, 1),
        Case::new("32 prompts of 16 to 111 x 8, early ends", &ragged, &grouped, 8),
    ];
    measure(c, "rollout", decoder, &cases);
}

/// Completions that end with a chance of one in `chance` at every token, at `most` tokens at the latest.
fn ending(chance: usize, most: usize) -> SamplingParams {
    SamplingParams {
        max_new_tokens: most,
        stop_ids: (0..VOCAB as u32).step_by(chance).collect(),
        ..SamplingParams::default()
    }
}

/// Groups of 8 whose completions end with a chance of 1/64 a token, in as many slots as there are sequences and in a
/// quarter of them.
fn ragged(c: &mut Criterion, decoder: &Decoder) {
    let sampling = ending(64, 256);
    for (name, count) in [("8 prompts of 8 to 64 x 8", 8), ("32 prompts of 8 to 64 x 8", 32)] {
        let prompts = prompts(count, |i| 8 + i * 37 % 57);
        let case = Case { prepack: PANELS, ..Case::new(name, &sampling, &prompts, 8) };
        beside_equal_lengths(c, "ragged", decoder, case);
    }
}

/// Decoding of sixteen sequences of about 1,024 tokens, whose keys and values are most of what a token reads, in f32
/// and in 8 bits.
fn int8(c: &mut Criterion, decoder: &Decoder) {
    let sampling = SamplingParams { max_new_tokens: 64, ..SamplingParams::default() };
    let prompts = prompts(16, |_| 992);
    let case = |name, dtype| Case { prepack: PANELS, dtype, decoding: true, ..Case::new(name, &sampling, &prompts, 1) };
    let cases = [
        case("16 prompts of 992, 64 new", KvCacheDtype::Auto),
        case("16 prompts of 992, 64 new, int8", KvCacheDtype::Int8),
    ];
    measure(c, "kv cache", decoder, &cases);
}

/// Lengths with a long tail, the same whatever is sampled.
fn long_tail(c: &mut Criterion, decoder: &Decoder) {
    let sampling = SamplingParams { max_new_tokens: 2048, ..SamplingParams::default() };
    let mut prompts = prompts(64, |i| 8 + i * 37 % 57);
    for (prompt, length) in prompts.iter_mut().zip(long_tailed(64)) {
        prompt.max_new_tokens = Some(length);
    }
    let case = Case {
        at_a_time: 16,
        prepack: PANELS,
        ..Case::new("64 prompts of 8 to 64, 16 at a time", &sampling, &prompts, 1)
    };
    beside_equal_lengths(c, "long tail", decoder, case);
}

/// Measures a case, and one with as many tokens whose completions all have the same length.
fn beside_equal_lengths(c: &mut Criterion, group: &str, decoder: &Decoder, case: Case) {
    let samples = case.sample(decoder).samples;
    let mean = new_tokens(&samples) as f64 / samples.len() as f64;
    let prompts: Vec<GenerationRequest> =
        case.prompts.iter().cloned().map(|prompt| GenerationRequest { max_new_tokens: None, ..prompt }).collect();
    let together = Case {
        name: &format!("{}, ending together", case.name),
        sampling: SamplingParams { max_new_tokens: mean.round() as usize, ..SamplingParams::default() },
        prompts: &prompts,
        ..case
    };
    measure(c, group, decoder, &[case, together]);
}

/// Few tokens of a 0.5B model.
fn real(c: &mut Criterion) {
    let decoder = workload::real();
    let sampling = SamplingParams { max_new_tokens: 16, ..SamplingParams::default() };
    let prompts = prompts(2, |_| 32);
    let case = Case { prepack: PANELS, ..Case::new("2 prompts of 32 x 4, 16 new", &sampling, &prompts, 4) };
    measure(c, "real", &decoder, &[case]);
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion = settings::criterion();
    let decoder = small();
    rollout(&mut criterion, &decoder);
    ragged(&mut criterion, &decoder);
    long_tail(&mut criterion, &decoder);
    int8(&mut criterion, &decoder);
    if settings::real() {
        real(&mut criterion);
    }
    criterion.final_summary();
}
