//! Whatever the schedule, every token is the draw of its key from the distribution that a plain forward gives.

mod eight_bits;
mod shared_cache;
mod shared_states;
mod tensor_group;
mod turns;

use super::top_k_top_p::sample_truncated;
use super::*;
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_arch::kv_cache::{state_bytes, state_slots};
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Accounts, Category, Home};
use firebrick_models::Arch;
use firebrick_models::attention::{Grouping, SequenceLayout};
use firebrick_models::decoder::Param;
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::random::DrawKey;
use firebrick_models::{Decoder, Error, KvCacheDtype, Prepack, Quantization};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

const VOCAB: usize = 61;

/// Distance of a draw to a boundary between two tokens within which it may go either way, and tolerance of log-probs.
const NEAR: f64 = 1e-5;

const PANELS: Prepack = Prepack { panels: true, quantization: None };

/// Settings with which a family of two layers has layers of both of its kinds.
fn kinds(family: &str) -> Value {
    match family {
        "gemma3_text" => {
            json!({"sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 1e3})
        }
        "smollm3" => json!({"no_rope_layers": [1, 0]}),
        "olmo3" => json!({
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
        }),
        "ministral3" => json!({
            "sliding_window": null,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.1
            }
        }),
        "qwen3_5_text" => json!({
            "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6
        }),
        "gpt_oss" => json!({"num_local_experts": 4, "num_experts_per_tok": 2}),
        _ => json!({}),
    }
}

fn decoder(family: &str) -> Decoder {
    let Value::Object(mut config) = json!({
        "model_type": family, "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 20.0,
        "initializer_range": 0.12
    }) else {
        unreachable!("an object")
    };
    config.extend(kinds(family).as_object().cloned().unwrap_or_default());
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
    let (arch, device) = (decoder.arch(), decoder.device());
    let layout = SequenceLayout::packed(&[tokens.len()], Grouping { waste: 0.0, queries: 0 }, device);
    let ctx = ForwardContext::whole(arch, layout, 0, device);
    let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [tokens.len()]), decoder.device());
    let logits = decoder.head().logits(decoder.hidden(ids, &ctx)) / temperature;
    let logits: Vec<f32> = logits.try_into_vec_as().expect("values");
    logits.chunks(VOCAB).map(<[f32]>::to_vec).collect()
}

/// [`NEAR`], and more where a recurrence carries rounding along.
fn nearness(decoder: &Decoder) -> f64 {
    decoder.arch().delta_net.map_or(NEAR, |_| 1e-4)
}

/// Checks one completion token by token. Tells how many tokens are not the draw itself, since it lies near a boundary.
fn check(
    decoder: &Decoder,
    request: &GenerationRequest,
    sampling: &SamplingParams,
    limits: &SchedulerConfig,
    sampled: &Sample,
) -> usize {
    let mut others = 0;
    let tokens = [request.tokens.as_slice(), &sampled.tokens].concat();
    let temperature = sampling.scoring_temperature();
    let near = nearness(decoder);
    let rows = scores(decoder, &tokens, temperature);
    let key = DrawKey { sample: request.key.sample + sampled.sample as u32, ..request.key };
    for (i, &token) in sampled.tokens.iter().enumerate() {
        let row = &rows[request.tokens.len() + i - 1];
        let place = format!("token {i} of sample {} of prompt {}", sampled.sample, sampled.request);
        if sampling.is_greedy() {
            let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert!(f64::from(most - row[token as usize]) < near, "{place}");
            continue;
        }
        let u = key.uniform(i as u32);
        let draw = |shift: f64| sample_truncated(row, sampling, (f64::from(u) + shift) as f32);
        let drawn = draw(0.0);
        let beside = [draw(-near), draw(near)];
        assert!(
            drawn.token == token || beside.iter().any(|d| d.token == token),
            "{place}: {token}, and its draw is {}",
            drawn.token
        );
        others += usize::from(drawn.token != token);
        if drawn.token == token {
            let apart = |a: f32, b: f32| f64::from((a - b).abs());
            assert!(apart(drawn.logp, sampled.logps[i]) < near, "{place}: {} and {}", drawn.logp, sampled.logps[i]);
            assert!(apart(drawn.full_logp, sampled.full_logps[i]) < near, "{place}: full");
        }
    }
    let stop = |t: &u32| sampling.stop_ids.contains(t);
    let (last, before) = sampled.tokens.split_last().expect("at least one token");
    assert!(!before.iter().any(stop), "a sequence went on after its end");
    let room = limits.max_model_len.map_or(usize::MAX, |most| most - request.tokens.len());
    let most = sampling.max_new_tokens.min(room);
    let expected = if stop(last) { FinishReason::Stop } else { FinishReason::Length };
    assert_eq!(sampled.finish, expected);
    assert!(expected == FinishReason::Stop || sampled.tokens.len() == most, "cut at {}", sampled.tokens.len());
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
    (any::<bool>(), any::<bool>())
        .prop_map(|(panels, rounds)| Prepack { panels, quantization: rounds.then_some(Quantization::Int8) })
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let samplings = prop_oneof![
        Just(SamplingParams::default()),
        Just(SamplingParams { temperature: 0.0, ..SamplingParams::default() }),
        Just(SamplingParams { temperature: 0.7, top_k: Some(9), ..SamplingParams::default() }),
        Just(SamplingParams { top_p: 0.8, min_p: 0.02, ..SamplingParams::default() }),
    ];
    let model_len = prop_oneof![Just(None), (32_usize..48).prop_map(Some)];
    (
        prop_oneof![
            Just("llama"),
            Just("gemma2"),
            Just("mistral"),
            Just("gemma3_text"),
            Just("smollm3"),
            Just("olmo3"),
            Just("ministral3"),
            Just("qwen3_5_text"),
            Just("gpt_oss"),
        ],
        prop::collection::vec(1_usize..30, 1..9),
        1_usize..5,
        (samplings, 1_usize..24, 0_u32..8),
        (1_usize..9, 0_usize..80, model_len, any::<bool>()),
        (prop::option::of(1.0_f64..6.0), prepack(), prop_oneof![Just(0), 1_usize..40]),
    )
        .prop_map(|(family, lengths, n, (sampling, new, stops), (slots, batched, model_len, ahead), memory)| {
            let (budget, prepack, system) = memory;
            Schedule {
                family,
                lengths,
                system,
                n,
                sampling: SamplingParams { max_new_tokens: new, stop_ids: (0..stops * 2).collect(), ..sampling },
                limits: SchedulerConfig {
                    max_num_batched_tokens: slots + batched,
                    max_model_len: model_len.map(|most| most + system),
                    async_scheduling: Some(ahead),
                    ..SchedulerConfig::new(slots)
                },
                budget,
                prepack,
            }
        })
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
        key: DrawKey { seed: 3, step: 1, prompt_index: salt as u32, sample: 0 },
        max_new_tokens: None,
    };
    lengths.iter().enumerate().map(request).collect()
}

fn run(schedule: &Schedule) -> Generated {
    run_counting(schedule).0
}

/// [`run`], and the number of tokens that differ from their draws.
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
        let length = |r: &GenerationRequest| r.tokens.len() + generator.criteria.max_new_tokens(r, &limits);
        let longest = requests.iter().map(length).max().unwrap_or(0);
        (limits.least_cache_bytes(decoder.arch(), longest) as f64 * share) as usize
    });
    let mut seen = Vec::new();
    let generated = generator
        .run_with(&requests, schedule.n, &limits, |s| {
            seen.push((s.request, s.sample));
        })
        .expect("samples");
    let names: Vec<_> = generated.samples.iter().map(|s| (s.request, s.sample)).collect();
    let expected: Vec<_> = (0..requests.len()).flat_map(|r| (0..schedule.n).map(move |s| (r, s))).collect();
    assert_eq!(names, expected, "every sample, in order");
    seen.sort_unstable();
    assert_eq!(seen, expected, "every sample is told once");
    let mut others = 0;
    for sample in &generated.samples {
        let request = &requests[sample.request];
        others += check(&read, request, &schedule.sampling, &limits, sample);
    }
    let stats = &generated.stats;
    let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
    assert!(stats.new_tokens >= drawn && (stats.preemptions > 0 || stats.new_tokens == drawn), "{stats:?}");
    assert!(stats.occupied + stats.overrun <= stats.slots);
    assert!(stats.overrun <= drawn && (stats.overrun == 0 || limits.async_scheduling == Some(true)), "{stats:?}");
    if let Some(bytes) = limits.kv_cache_bytes {
        // states come on top, in no more slots than an estimate counts
        let running = limits.max_num_seqs.min(requests.len() * schedule.n);
        let bytes = bytes + state_slots(running) * state_bytes(decoder.arch());
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
    let config = ProptestConfig { cases: 160, ..ProptestConfig::default() };
    let counts = std::cell::Cell::new((0, 0));
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let outcome = runner.run(&schedule(), |schedule| {
        let (generated, others) = run_counting(&schedule);
        let drawn: usize = generated.samples.iter().map(|s| s.tokens.len()).sum();
        let (draws, differing) = counts.get();
        counts.set((draws + drawn, differing + others));
        Ok(())
    });
    outcome.expect("every schedule holds");
    let (draws, differing) = counts.get();
    // a draw lies within 1e-5 of one of a few boundaries about once in ten thousand times
    assert!(differing * 1000 <= draws, "{differing} of {draws} tokens are not their draws");
}

fn crowded(budget: Option<f64>) -> Schedule {
    Schedule {
        family: "llama",
        lengths: vec![5, 9, 3, 12, 7, 4, 8, 6],
        system: 0,
        n: 3,
        sampling: SamplingParams { max_new_tokens: 40, ..SamplingParams::default() },
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
    let tokens = |g: &Generated| g.samples.iter().map(|s| s.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(tokens(&plenty), tokens(&short));
}

#[test]
fn slots_stay_taken_while_prompts_wait() {
    let ragged = Schedule {
        sampling: SamplingParams { max_new_tokens: 32, stop_ids: (0..4).collect(), ..SamplingParams::default() },
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
    let sampling = SamplingParams { max_new_tokens: 10, ..SamplingParams::default() };
    let mut requests = requests(&[4, 7, 5]);
    requests[1].max_new_tokens = Some(3);
    requests[2].max_new_tokens = Some(20);
    let generator = Generator::new(&decoder, None, &sampling).expect("valid settings");
    let lengths: Vec<usize> = generator.run(&requests, 2, 4).expect("samples").iter().map(|s| s.tokens.len()).collect();
    assert_eq!(lengths, [10, 10, 3, 3, 10, 10]);
    requests[0].max_new_tokens = Some(0);
    let error = generator.run(&requests, 2, 4).expect_err("no tokens");
    assert!(error.to_string().contains("prompt 0"), "{error}");
}
