//! Prefix caching with linear attention: what is sampled after kept states is what each sequence samples alone, with
//! nothing cached.

use super::long_rows::models;
use crate::support::model::Model;
use crate::support::{assert_close, checked, is_foreign, report};
use firebrick_models::random::DrawKey;
use firebrick_sampler::{Generated, GenerationRequest, Generator, Sample, SamplingParams, SchedulerConfig};

/// How far a log-prob may be apart, relative above one: prefill in chunks that end elsewhere sums in another order, and
/// states add the roundings up. With AVX-512 half of them are within 2e-6, and the furthest is 3.5e-5.
const NEAR: f64 = 5e-5;

/// How far all of a completion may be apart on average.
const NEAR_ON_AVERAGE: f64 = 1e-5;

/// Tokens that prompts begin with: three whole blocks and a part of one.
const COMMON: u32 = 53;

fn linear() -> impl Iterator<Item = Model> {
    let all = models().map(|(model, _)| model);
    all.filter(|model| model.decoder.arch().delta_net.is_some())
}

fn found(cases: usize, what: &str) {
    if cases > 0 || !is_foreign() {
        checked(what, cases);
    } else {
        report(&format!("no {what}"));
    }
}

fn sampling() -> SamplingParams {
    SamplingParams { max_new_tokens: 20, ..SamplingParams::default() }
}

/// Prompts with [`COMMON`] tokens in common, and so many of their own.
fn requests(own: &[u32]) -> Vec<GenerationRequest> {
    let prompt = |salt: u32, own: u32| {
        let common = (0..COMMON).map(|i| i * 7 % 61 + 3);
        common.chain((0..own).map(move |i| (i * 5 + salt * 11) % 61 + 3))
    };
    let request = |(salt, &own): (u32, &u32)| GenerationRequest {
        tokens: prompt(salt, own).collect(),
        key: DrawKey { seed: 3, step: 0, prompt_index: salt, sample: 0 },
        max_new_tokens: None,
    };
    (0..).zip(own).map(request).collect()
}

/// One completion of a prompt, by a generator that has sampled nothing before.
fn alone(model: &Model, request: &GenerationRequest, sample: usize) -> Sample {
    let sampling = sampling();
    let generator = Generator::new(&model.decoder, None, &sampling).expect("sampling that works");
    let mut request = request.clone();
    request.key.sample += sample as u32;
    let generated = generator.run_with(&[request], 1, &SchedulerConfig::new(1), |_| {});
    let Generated { mut samples, stats } = generated.expect("a sample");
    assert_eq!((stats.prefix_cache_hits, stats.preemptions), (0, 0));
    samples.remove(0)
}

/// The same tokens and log-probs as [`alone`].
fn assert_as_alone(model: &Model, requests: &[GenerationRequest], generated: &Generated) {
    for found in &generated.samples {
        let expected = alone(model, &requests[found.request], found.sample);
        let place = format!("{}: sample {} of prompt {}", model.name, found.sample, found.request);
        assert_eq!(found.tokens, expected.tokens, "{place}");
        let [a, b] = [found, &expected].map(|s| s.logps.iter().chain(&s.full_logps));
        let pairs: Vec<(f64, f64)> = a.zip(b).map(|(a, b)| (f64::from(*a), f64::from(*b))).collect();
        for &(a, b) in &pairs {
            assert_close(&place, a, b, NEAR);
        }
        let apart: f64 = pairs.iter().map(|(a, b)| (a - b).abs()).sum();
        assert!(apart / pairs.len() as f64 <= NEAR_ON_AVERAGE, "{place}: on average");
    }
}

#[test]
fn completions_of_prompts_that_begin_alike_are_those_of_each_alone() {
    let mut cases = 0;
    for model in linear() {
        let requests = requests(&[5, 21, 3, 12, 30, 7]);
        for batched in [2048, 40] {
            let limits = SchedulerConfig { max_num_batched_tokens: batched, ..SchedulerConfig::new(9) };
            let sampling = sampling();
            let generator = Generator::new(&model.decoder, None, &sampling);
            let generator = generator.expect("sampling that works");
            let generated = generator.run_with(&requests, 3, &limits, |_| {});
            let generated = generated.expect("samples");
            // of prompts that run one at a time the second finds where it parts from the first
            let share = if batched < 100 { 4 } else { 5 };
            assert_eq!(generated.stats.prefix_cache_hits, share * 48);
            assert_as_alone(&model, &requests, &generated);
            cases += generated.samples.len();
        }
    }
    found(cases, "completions of prompts that begin alike");
}

#[test]
fn completions_are_the_same_where_sequences_are_preempted_and_resume_from_kept_states() {
    let mut cases = 0;
    for model in linear() {
        let requests = requests(&[5, 21, 3, 12, 30, 7]);
        let limits = SchedulerConfig::new(9);
        let arch = model.decoder.arch();
        let longest = COMMON as usize + 30 + sampling().max_new_tokens;
        let limits = SchedulerConfig { kv_cache_bytes: Some(2 * limits.least_cache_bytes(arch, longest)), ..limits };
        let sampling = sampling();
        let generator = Generator::new(&model.decoder, None, &sampling);
        let generator = generator.expect("sampling that works");
        let generated = generator.run_with(&requests, 3, &limits, |_| {});
        let generated = generated.expect("samples");
        let stats = &generated.stats;
        assert!(stats.preemptions > 0 && stats.recomputed_tokens > 0, "{stats:?}");
        assert!(stats.prefix_cache_hits > 4 * 48, "{stats:?}");
        assert_as_alone(&model, &requests, &generated);
        cases += generated.samples.len();
    }
    found(cases, "completions around preemptions");
}

#[test]
fn later_turns_are_those_of_conversations_that_run_from_their_first_token() {
    let mut cases = 0;
    for model in linear() {
        let mut requests = requests(&[5, 21, 3, 12]);
        let limits = SchedulerConfig { keep_completions: true, ..SchedulerConfig::new(4) };
        let sampling = sampling();
        let generator = Generator::new(&model.decoder, None, &sampling);
        let generator = generator.expect("sampling that works");
        for turn in 0..3 {
            let generated = generator.run_with(&requests, 1, &limits, |_| {});
            let generated = generated.expect("samples");
            if turn > 0 {
                // the last token that was sampled, and the answer's three
                assert_eq!(generated.stats.prefill_tokens, 4 * requests.len());
            }
            assert_as_alone(&model, &requests, &generated);
            cases += generated.samples.len();
            for sample in &generated.samples {
                let tokens = &mut requests[sample.request].tokens;
                tokens.extend(&sample.tokens);
                tokens.extend([31 + turn, 40, 9]);
            }
        }
    }
    found(cases, "turns");
}
