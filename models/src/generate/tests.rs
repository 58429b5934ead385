//! Whatever the schedule, every token is the draw of its key from the distribution that a plain forward gives.

use super::top_k_top_p::sample_truncated;
use super::*;
use crate::Arch;
use crate::decoder::Param;
use crate::forward_context::{Columns, ForwardContext};
use crate::random::DrawKey;
use crate::{Decoder, Error, KvCacheDtype, Prepack, Quantization};
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Accounts, Category, Home};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

const VOCAB: usize = 61;

/// How near a draw may be to a boundary between two tokens to go either way, and how far log-probs may be apart.
const NEAR: f64 = 1e-5;

const PANELS: Prepack = Prepack {
    panels: true,
    quantization: None,
};

const INT8: Prepack = Prepack {
    panels: false,
    quantization: Some(Quantization::Int8),
};

fn decoder(family: &str) -> Decoder {
    let Value::Object(config) = json!({
        "model_type": family, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 20.0,
        "initializer_range": 0.12
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new(family)).expect("a valid architecture");
    Decoder::random(arch, 1, &Device::flex())
}

/// The model whose layers' matrices are what 8 bits leave of them.
fn in_8_bits(decoder: &Decoder) -> Decoder {
    let round = |row: &[f32]| {
        let scale = row.iter().fold(0.0_f32, |most, w| most.max(w.abs())) / 127.0;
        let rounded = row.iter().map(|w| scale * (w / scale).round_ties_even());
        rounded.collect::<Vec<_>>()
    };
    let mut rounded = decoder.clone();
    rounded
        .update(|_, spec, param| match param {
            Param::Device(w) if spec.slot.is_linear() => {
                let (shape, device) = (w.dims(), w.device());
                let values: Vec<f32> = w.try_into_vec_as().expect("values");
                let values: Vec<f32> = values.chunks(shape[1]).flat_map(round).collect();
                let w = Tensor::from_data(TensorData::new(values, shape), &device);
                Ok::<_, Error>(Param::Device(w))
            }
            other => Ok(other),
        })
        .expect("rounded weights");
    rounded
}

/// Logits over temperature after every token of a sequence, by one forward without a cache.
fn scores(decoder: &Decoder, tokens: &[u32], temperature: f64) -> Vec<Vec<f32>> {
    let columns = Columns {
        starts: &[0],
        first: 0,
        len: tokens.len(),
    };
    let ctx = ForwardContext::new(decoder.arch(), columns, decoder.device());
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [tokens.len()]), decoder.device());
    let logits = decoder.head().logits(decoder.hidden(ids, &ctx)) / temperature;
    let logits: Vec<f32> = logits.try_into_vec_as().expect("values");
    logits.chunks(VOCAB).map(<[f32]>::to_vec).collect()
}

/// Checks one completion token by token. Tells how many tokens are not the draw itself, since it lies near a boundary.
fn check(
    decoder: &Decoder,
    request: &GenerationRequest,
    sampling: &SamplingParams,
    limits: &SchedulerConfig,
    found: &Sample,
) -> usize {
    let mut others = 0;
    let tokens = [request.tokens.as_slice(), &found.tokens].concat();
    let temperature = sampling.scoring_temperature();
    let rows = scores(decoder, &tokens, temperature);
    let key = DrawKey {
        sample: request.key.sample + found.sample as u32,
        ..request.key
    };
    for (i, &token) in found.tokens.iter().enumerate() {
        let row = &rows[request.tokens.len() + i - 1];
        let place = format!(
            "token {i} of sample {} of prompt {}",
            found.sample, found.request
        );
        if sampling.is_greedy() {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert!(f64::from(most - row[token as usize]) < NEAR, "{place}");
            continue;
        }
        let u = key.uniform(i as u32);
        let draw = |shift: f64| sample_truncated(row, sampling, (f64::from(u) + shift) as f32);
        let drawn = draw(0.0);
        let near = [draw(-NEAR), draw(NEAR)];
        assert!(
            drawn.token == token || near.iter().any(|d| d.token == token),
            "{place}: {token}, and its draw is {}",
            drawn.token
        );
        others += usize::from(drawn.token != token);
        if drawn.token == token {
            let apart = |a: f32, b: f32| f64::from((a - b).abs());
            assert!(
                apart(drawn.logp, found.logps[i]) < NEAR,
                "{place}: {} and {}",
                drawn.logp,
                found.logps[i]
            );
            assert!(
                apart(drawn.full_logp, found.full_logps[i]) < NEAR,
                "{place}: full"
            );
        }
    }
    let stop = |t: &u32| sampling.stop_ids.contains(t);
    let (last, before) = found.tokens.split_last().expect("at least one token");
    assert!(!before.iter().any(stop), "a sequence went on after its end");
    let room = limits
        .max_model_len
        .map_or(usize::MAX, |most| most - request.tokens.len());
    let most = sampling.max_new_tokens.min(room);
    let expected = if stop(last) {
        FinishReason::Stop
    } else {
        FinishReason::Length
    };
    assert_eq!(found.finish, expected);
    assert!(
        expected == FinishReason::Stop || found.tokens.len() == most,
        "cut at {}",
        found.tokens.len()
    );
    others
}

#[derive(Clone, Debug)]
struct Schedule {
    family: &'static str,
    lengths: Vec<usize>,
    /// Tokens that all prompts begin with.
    system: usize,
    n: usize,
    sampling: SamplingParams,
    limits: SchedulerConfig,
    /// Bytes of the cache over the least it may have.
    budget: Option<f64>,
    prepack: Prepack,
}

fn prepack() -> impl Strategy<Value = Prepack> {
    (any::<bool>(), any::<bool>()).prop_map(|(panels, rounds)| Prepack {
        panels,
        quantization: rounds.then_some(Quantization::Int8),
    })
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let samplings = prop_oneof![
        Just(SamplingParams::default()),
        Just(SamplingParams {
            temperature: 0.0,
            ..SamplingParams::default()
        }),
        Just(SamplingParams {
            temperature: 0.7,
            top_k: Some(9),
            ..SamplingParams::default()
        }),
        Just(SamplingParams {
            top_p: 0.8,
            min_p: 0.02,
            ..SamplingParams::default()
        }),
    ];
    let model_len = prop_oneof![Just(None), (32_usize..48).prop_map(Some)];
    (
        prop_oneof![Just("llama"), Just("gemma2"), Just("mistral")],
        prop::collection::vec(1_usize..30, 1..9),
        1_usize..5,
        (samplings, 1_usize..24, 0_u32..8),
        (1_usize..9, 0_usize..80, model_len, any::<bool>()),
        (
            prop::option::of(1.0_f64..6.0),
            prepack(),
            prop_oneof![Just(0), 1_usize..40],
        ),
    )
        .prop_map(
            |(
                family,
                lengths,
                n,
                (sampling, new, stops),
                (slots, batched, model_len, ahead),
                memory,
            )| {
                let (budget, prepack, system) = memory;
                Schedule {
                    family,
                    lengths,
                    system,
                    n,
                    sampling: SamplingParams {
                        max_new_tokens: new,
                        stop_ids: (0..stops * 2).collect(),
                        ..sampling
                    },
                    limits: SchedulerConfig {
                        max_num_batched_tokens: slots + batched,
                        max_model_len: model_len.map(|most| most + system),
                        async_scheduling: Some(ahead),
                        ..SchedulerConfig::new(slots)
                    },
                    budget,
                    prepack,
                }
            },
        )
}

fn requests(lengths: &[usize]) -> Vec<GenerationRequest> {
    requests_after(0, lengths)
}

/// Prompts that begin with the same `system` tokens.
fn requests_after(system: usize, lengths: &[usize]) -> Vec<GenerationRequest> {
    let token = |i: usize, salt: usize| ((i * 7919 + salt * 104_729) % VOCAB) as u32;
    let first = move || (0..system).map(move |i| token(i, 97));
    let request = |(salt, &len): (usize, &usize)| GenerationRequest {
        tokens: first().chain((0..len).map(|i| token(i, salt))).collect(),
        key: DrawKey {
            seed: 3,
            step: 1,
            prompt_index: salt as u32,
            sample: 0,
        },
        max_new_tokens: None,
    };
    lengths.iter().enumerate().map(request).collect()
}

fn run(schedule: &Schedule) -> Generated {
    run_counting(schedule).0
}

/// The same, and how many tokens differ from their draws.
fn run_counting(schedule: &Schedule) -> (Generated, usize) {
    let decoder = decoder(schedule.family);
    let requests = requests_after(schedule.system, &schedule.lengths);
    let mut limits = schedule.limits;
    let generator = Generator::new(&decoder, None, &schedule.sampling).expect("valid settings");
    let generator = generator.prepack(schedule.prepack);
    let read = match schedule.prepack.quantization {
        Some(Quantization::Int8) => in_8_bits(&decoder),
        None => decoder.clone(),
    };
    limits.kv_cache_bytes = schedule.budget.map(|share| {
        let length =
            |r: &GenerationRequest| r.tokens.len() + generator.criteria.max_new_tokens(r, &limits);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        (limits.least_cache_bytes(decoder.arch(), longest) as f64 * share) as usize
    });
    let mut seen = Vec::new();
    let generated = generator
        .run_with(&requests, schedule.n, &limits, |s| {
            seen.push((s.request, s.sample));
        })
        .expect("samples");
    let names: Vec<_> = generated
        .samples
        .iter()
        .map(|s| (s.request, s.sample))
        .collect();
    let all: Vec<_> = (0..requests.len())
        .flat_map(|r| (0..schedule.n).map(move |s| (r, s)))
        .collect();
    assert_eq!(names, all, "every sample, in order");
    seen.sort_unstable();
    assert_eq!(seen, all, "every sample is told once");
    let mut others = 0;
    for sample in &generated.samples {
        let request = &requests[sample.request];
        others += check(&read, request, &schedule.sampling, &limits, sample);
    }
    let stats = &generated.stats;
    let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
    assert!(
        stats.new_tokens >= drawn && (stats.preemptions > 0 || stats.new_tokens == drawn),
        "{stats:?}"
    );
    assert!(stats.occupied + stats.overrun <= stats.slots);
    assert!(
        stats.overrun <= drawn && (stats.overrun == 0 || limits.async_scheduling == Some(true)),
        "{stats:?}"
    );
    if let Some(bytes) = limits.kv_cache_bytes {
        assert!(
            stats.cache_bytes <= bytes && stats.peak_cache_bytes <= stats.cache_bytes,
            "{} of {bytes}",
            stats.cache_bytes
        );
    }
    (generated, others)
}

#[test]
fn tokens_and_log_probs_are_those_of_a_plain_forward_under_every_schedule() {
    let config = ProptestConfig {
        cases: 160,
        ..ProptestConfig::default()
    };
    let counts = std::cell::Cell::new((0, 0));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let outcome = runner.run(&schedule(), |schedule| {
        let (generated, others) = run_counting(&schedule);
        let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
        let (all, differing) = counts.get();
        counts.set((all + drawn, differing + others));
        Ok(())
    });
    outcome.expect("every schedule holds");
    let (all, differing) = counts.get();
    // a draw lies within 1e-5 of one of a few boundaries about once in ten thousand times
    assert!(
        differing * 1000 <= all,
        "{differing} of {all} tokens are not their draws"
    );
}

fn crowded(budget: Option<f64>) -> Schedule {
    Schedule {
        family: "llama",
        lengths: vec![5, 9, 3, 12, 7, 4, 8, 6],
        system: 0,
        n: 3,
        sampling: SamplingParams {
            max_new_tokens: 40,
            ..SamplingParams::default()
        },
        limits: SchedulerConfig::new(8),
        budget,
        prepack: Prepack::default(),
    }
}

#[test]
fn a_short_cache_preempts_and_loses_nothing() {
    let plenty = run(&crowded(None));
    let short = run(&crowded(Some(1.5)));
    assert_eq!(plenty.stats.preemptions, 0);
    assert!(short.stats.preemptions > 0 && short.stats.recomputed_tokens > 0);
    let tokens = |g: &Generated| {
        g.samples
            .iter()
            .map(|s| s.tokens.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(tokens(&plenty), tokens(&short));
}

#[test]
fn slots_stay_taken_while_prompts_wait() {
    let ragged = Schedule {
        sampling: SamplingParams {
            max_new_tokens: 32,
            stop_ids: (0..4).collect(),
            ..SamplingParams::default()
        },
        lengths: vec![6; 60],
        ..crowded(None)
    };
    let stats = run(&ragged).stats;
    assert!(stats.occupancy() > 0.85, "{stats:?}");
}

#[test]
fn the_prompt_of_a_group_is_run_once() {
    let stats = run(&crowded(None)).stats;
    assert_eq!(stats.prefill_tokens, 5 + 9 + 3 + 12 + 7 + 4 + 8 + 6);
}

#[test]
fn a_request_may_limit_its_own_completions() {
    let decoder = decoder("llama");
    let sampling = SamplingParams {
        max_new_tokens: 10,
        ..SamplingParams::default()
    };
    let mut requests = requests(&[4, 7, 5]);
    requests[1].max_new_tokens = Some(3);
    requests[2].max_new_tokens = Some(20);
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let samples = generator.run(&requests, 2, 4).expect("samples");
    let lengths: Vec<usize> = samples.iter().map(|s| s.tokens.len()).collect();
    assert_eq!(lengths, [10, 10, 3, 3, 10, 10]);
    requests[0].max_new_tokens = Some(0);
    let error = generator.run(&requests, 2, 4).expect_err("no tokens");
    assert!(error.to_string().contains("prompt 0"), "{error}");
}

#[test]
fn a_cache_too_small_for_one_sequence_is_refused_with_the_smallest_that_would_do() {
    let decoder = decoder("llama");
    let sampling = SamplingParams {
        max_new_tokens: 10,
        ..SamplingParams::default()
    };
    let limits = SchedulerConfig {
        kv_cache_bytes: Some(1000),
        ..SchedulerConfig::new(4)
    };
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let error = generator
        .run_with(&requests(&[4]), 1, &limits, |_| {})
        .expect_err("too small");
    let least = limits.least_cache_bytes(decoder.arch(), 14);
    assert!(error.to_string().contains(&least.to_string()), "{error}");
}

#[test]
fn the_account_holds_what_the_cache_takes_and_gives_it_back() {
    let decoder = decoder("llama");
    let sampling = SamplingParams {
        max_new_tokens: 10,
        ..SamplingParams::default()
    };
    let accounts = Accounts::new();
    let generator = Generator::new(&decoder, None, &sampling)
        .expect("valid settings")
        .accounted(&accounts)
        .prepack(PANELS);
    let generated = generator
        .run_with(&requests(&[4, 7]), 2, &SchedulerConfig::new(4), |_| {})
        .expect("samples");
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!(balance.peak_bytes, generated.stats.cache_bytes as u64);
    assert!(generated.stats.peak_cache_bytes <= generated.stats.cache_bytes);
    drop(generator);
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!(balance.bytes, 0);
    // and what copies of the matrices take
    let copies = accounts.balance(Category::Parameters, Home::Device);
    assert_eq!(
        copies.peak_bytes,
        decoder.prepacked(PANELS).expect("panels").prepacked_bytes() as u64
    );
    assert!(copies.peak_bytes > 0 && copies.bytes == 0);
}

#[test]
fn log_probs_in_8_bits_are_near_those_of_the_trained_weights_and_not_the_same() {
    let mut apart = Vec::new();
    for family in ["llama", "gemma2", "mistral"] {
        let schedule = Schedule {
            family,
            prepack: INT8,
            ..crowded(None)
        };
        let decoder = decoder(family);
        for (sample, request) in run(&schedule).samples.iter().flat_map(|sample| {
            let all = requests(&schedule.lengths);
            [(sample.clone(), all[sample.request].clone())]
        }) {
            let tokens = [request.tokens.as_slice(), &sample.tokens].concat();
            let rows = scores(&decoder, &tokens, 1.0);
            for (i, (&token, &logp)) in sample.tokens.iter().zip(&sample.logps).enumerate() {
                let row = &rows[request.tokens.len() + i - 1];
                let sum: f64 = row.iter().map(|&z| f64::from(z).exp()).sum();
                apart.push((f64::from(row[token as usize]) - sum.ln() - f64::from(logp)).abs());
            }
        }
    }
    let mean = apart.iter().sum::<f64>() / apart.len() as f64;
    let most = apart.iter().copied().fold(0.0, f64::max);
    assert!(mean > 1e-4 && mean < 0.01 && most < 0.06, "{mean} {most}");
}

#[test]
fn eight_bits_take_a_quarter_and_what_no_kernel_would_read_is_refused() {
    let decoder = decoder("llama");
    let bytes = |prepack| {
        decoder
            .prepacked(prepack)
            .expect("copies")
            .prepacked_bytes()
    };
    assert_eq!(bytes(Prepack::default()), 0);
    let head = 4 * VOCAB.next_multiple_of(32) * 32;
    let [exact, codes] = [bytes(PANELS) - head, bytes(INT8)];
    assert!(
        4 * codes > exact && 4 * codes < exact * 5 / 4,
        "{exact} {codes}"
    );
    let both = Prepack {
        panels: true,
        ..INT8
    };
    assert_eq!(bytes(both), codes + head);
    for unread in [decoder.in_precision(Precision::Bf16), {
        let mut away = decoder.clone();
        away.move_to(Home::Host).expect("weights on the host");
        away
    }] {
        let error = unread.prepacked(INT8).expect_err("no kernel").to_string();
        assert!(error.contains("without quantization"), "{error}");
    }
}

#[test]
fn prompts_that_begin_alike_share_blocks_and_draw_the_same_tokens() {
    let alike = Schedule {
        system: 50,
        lengths: vec![5, 9, 3, 12, 7, 4, 8, 6],
        ..crowded(None)
    };
    let stats = run(&alike).stats;
    // the first prompt runs all of them, the seven others find three full blocks of 50 tokens
    assert_eq!(stats.prefix_cache_hits, 7 * 48, "{stats:?}");
    assert_eq!(stats.prefill_tokens, 8 * 50 + 54 - 7 * 48);
    assert!(stats.kv_shared() > 0.5, "{stats:?}");
}

#[test]
fn the_next_turn_of_a_conversation_is_prefilled_from_its_new_tokens_on() {
    let decoder = decoder("llama");
    let sampling = SamplingParams {
        max_new_tokens: 30,
        ..SamplingParams::default()
    };
    let limits = SchedulerConfig {
        max_model_len: Some(120),
        ..SchedulerConfig::new(4)
    };
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let first = requests(&[20, 7]);
    let run = |requests: &[GenerationRequest]| {
        let generated = generator.run_with(requests, 1, &limits, |_| {});
        generated.expect("samples")
    };
    let turn = run(&first);
    let second: Vec<GenerationRequest> = first
        .iter()
        .zip(&turn.samples)
        .map(|(request, sample)| GenerationRequest {
            tokens: [&request.tokens[..], &sample.tokens, &[1, 2, 3]].concat(),
            ..request.clone()
        })
        .collect();
    let later = run(&second);
    // of 50 and 37 tokens, the last one of which is not in the cache, three blocks and two
    assert_eq!(later.stats.prefix_cache_hits, 48 + 32);
    for sample in &later.samples {
        let request = &second[sample.request];
        check(&decoder, request, &sampling, &limits, sample);
    }
}

#[test]
fn two_thousand_sequences_pass_through_pools_of_one_size() {
    let decoder = decoder("llama");
    let sampling = SamplingParams {
        max_new_tokens: 40,
        stop_ids: (0..6).collect(),
        ..SamplingParams::default()
    };
    let accounts = Accounts::new();
    let generator = Generator::new(&decoder, None, &sampling)
        .expect("valid settings")
        .accounted(&accounts);
    let lengths: Vec<usize> = (0..256).map(|i| 1 + i * 7 % 24).collect();
    let limits = SchedulerConfig::new(256);
    let generated = generator.run_with(&requests(&lengths), 8, &limits, |_| {});
    let stats = generated.expect("samples").stats;
    let blocks = limits.blocks(decoder.arch(), 2048, 64).expect("no limit");
    let demand = limits.kv_cache_demand(decoder.arch(), 2048, 64);
    let bytes = demand.bytes(decoder.arch(), &blocks);
    let balance = accounts.balance(Category::KvCache, Home::Device);
    assert_eq!((balance.bytes, balance.peak_bytes), (bytes, bytes));
    assert_eq!((stats.cache_bytes as u64, stats.preemptions), (bytes, 0));
    assert!(
        stats.peak_blocks <= blocks[0] && stats.occupancy() > 0.8,
        "{stats:?}"
    );
}

#[test]
fn keys_and_values_in_8_bits_give_the_same_tokens_under_every_schedule() {
    for family in ["llama", "gemma2", "mistral"] {
        let decoder = decoder(family);
        let sampling = SamplingParams {
            max_new_tokens: 20,
            ..SamplingParams::default()
        };
        let requests = requests_after(20, &[5, 9, 30, 12]);
        let whole = SchedulerConfig {
            kv_cache_dtype: KvCacheDtype::Int8,
            ..SchedulerConfig::new(64)
        };
        let chunked = SchedulerConfig {
            max_num_batched_tokens: 7,
            ..SchedulerConfig {
                max_num_seqs: 3,
                ..whole
            }
        };
        let least = chunked.least_cache_bytes(decoder.arch(), 70);
        let short = SchedulerConfig {
            kv_cache_bytes: Some(least * 3 / 2),
            ..chunked
        };
        let run = |limits: &SchedulerConfig| {
            let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
            let generated = generator.run_with(&requests, 3, limits, |_| {});
            generated.expect("samples")
        };
        let expected = run(&whole);
        // a number at the boundary of two codes may be rounded to either, which few log-probs can tell
        for limits in [chunked, short] {
            let found = run(&limits);
            let pairs = || found.samples.iter().zip(&expected.samples);
            let same = pairs().filter(|(a, b)| a.tokens == b.tokens);
            assert!(same.clone().count() >= 11, "{family}: {limits:?}");
            let apart = same.flat_map(|(a, b)| a.logps.iter().zip(&b.logps));
            let apart: Vec<f64> = apart.map(|(a, b)| f64::from((a - b).abs())).collect();
            let exact = apart.iter().filter(|&&apart| apart < NEAR).count();
            assert!(
                exact * 10 >= apart.len() * 9,
                "{family}: {exact} of {}",
                apart.len()
            );
            assert!(apart.iter().all(|&apart| apart < 0.01), "{family}");
        }
        // and not those of f32, which they are near
        let exact = run(&SchedulerConfig::new(64));
        let first = |g: &Generated| g.samples.iter().map(|s| s.logps[0]).collect::<Vec<_>>();
        let apart: Vec<f32> = first(&exact)
            .iter()
            .zip(first(&expected))
            .map(|(a, b)| (a - b).abs())
            .collect();
        let most = apart.iter().copied().fold(0.0, f32::max);
        assert!(most > 1e-6 && most < 0.05, "{family}: {apart:?}");
        let bytes = |g: &Generated| g.stats.cache_bytes as f64;
        // eight dimensions a head: 8 codes of a byte and half of four bytes of scales, where f32 has 32
        assert!((bytes(&expected) / bytes(&exact) - 10.0 / 32.0).abs() < 1e-9);
    }
}
