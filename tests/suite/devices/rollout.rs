//! Sampling: tokens and log-probs do not depend on the device, the slots or the chunks.

use super::{model, on_devices};
use crate::support::model::{Model, in_8_bits};
use crate::support::tolerance::{F32_ELSEWHERE, LINEAR_ATTENTION};
use crate::support::{assert_close, checked, fixtures, folders};
use burn::tensor::Device;
use firebrick_backends::device::Backend;
use firebrick_backends::kernels;
use firebrick_models::random::DrawKey;
use firebrick_models::{Arch, Decoder, Prepack, Quantization};
use firebrick_sampler::{Generated, GenerationRequest, Generator, Sample, SamplingParams, SchedulerConfig};
use serde_json::{Value, json};
use std::path::Path;

on_devices! {
    greedy_continuations_are_those_of_transformers,
    draws_are_those_of_the_cpu,
    draws_of_a_few_long_sequences_are_those_of_the_cpu,
    slots_chunks_and_a_short_cache_change_no_token,
    a_token_that_is_run_before_the_last_is_seen_changes_none,
    prompts_that_share_states_go_on_as_each_does_alone,
    weights_in_8_bits_draw_what_a_model_of_those_numbers_draws,
}

fn greedy_continuations_are_those_of_transformers(device: &Device) {
    let mut samples = 0;
    for dir in folders("models") {
        let (model, _) = model(&dir, device);
        if !model.manifest.is_local() {
            continue;
        }
        let greedy = model.manifest.greedy.as_ref().expect("continuations");
        let prompts: Vec<Vec<u32>> = greedy.samples.iter().map(|s| s.prompt_ids.clone()).collect();
        let asked = Asked { temperature: 0.0, new: greedy.max_new_tokens, n: 1, kept: None, stop_ids: 0 };
        let found = generate(&model, &prompts, asked, &SchedulerConfig::new(64));
        for (found, expected) in found.iter().zip(&greedy.samples) {
            assert_eq!(found.tokens, expected.new_ids, "{}", model.name);
            samples += 1;
        }
    }
    checked("greedy continuations", samples);
}

fn draws_are_those_of_the_cpu(device: &Device) {
    let (here, _) = model(&fixtures().join("models/llama-gqa"), device);
    let on_cpu = Model::load(&here.dir);
    for asked in [DRAWN, TRUNCATED] {
        let sample = |model: &Model| generate(model, &PROMPTS.map(<[u32]>::to_vec), asked, &SchedulerConfig::new(64));
        assert_same(&sample(&here), &sample(&on_cpu));
    }
}

fn draws_of_a_few_long_sequences_are_those_of_the_cpu(device: &Device) {
    let Value::Object(config) = json!({
        "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("test")).expect("a valid architecture");
    let random = |device: &Device| {
        let mut model = Model::load(&fixtures().join("models/qwen2-tied"));
        model.decoder = Decoder::random(arch.clone(), 1, device);
        model
    };
    let (here, on_cpu) = (random(device), random(&crate::support::device()));
    // columns enough for a GPU to divide them among cubes
    let long: Vec<u32> = (0..1100).map(|i| i * 31 % 59 + 3).collect();
    let prompts = [long, PROMPTS[0].to_vec()];
    let asked = Asked { new: 4, n: 1, ..DRAWN };
    let sample = |model: &Model| generate(model, &prompts, asked, &SchedulerConfig::new(4));
    assert_same(&sample(&here), &sample(&on_cpu));
}

fn slots_chunks_and_a_short_cache_change_no_token(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let arch = model.decoder.arch();
    let sample = |limits: &SchedulerConfig| generate(&model, &PROMPTS.map(<[u32]>::to_vec), DRAWN, limits);
    let expected = sample(&SchedulerConfig::new(64));
    let least = SchedulerConfig::new(4).least_cache_bytes(arch, PROMPTS[1].len() + DRAWN.new);
    let chunked = SchedulerConfig { max_num_batched_tokens: 3, ..SchedulerConfig::new(3) };
    let short = SchedulerConfig { kv_cache_bytes: Some(2 * least), ..SchedulerConfig::new(4) };
    for limits in [SchedulerConfig::new(1), chunked, short] {
        assert_same(&sample(&limits), &expected);
    }
}

fn a_token_that_is_run_before_the_last_is_seen_changes_none(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let asked = Asked { stop_ids: 20, new: 24, ..DRAWN };
    let run = |ahead| {
        let limits = SchedulerConfig { async_scheduling: Some(ahead), ..SchedulerConfig::new(64) };
        run(&model, &PROMPTS.map(<[u32]>::to_vec), asked, &limits)
    };
    let (late, at_once) = (run(true), run(false));
    assert_same(&late.samples, &at_once.samples);
    assert_eq!(at_once.stats.overrun, 0);
    assert!(late.stats.overrun > 0, "{:?}", late.stats);
    assert_eq!(late.stats.new_tokens, at_once.stats.new_tokens);
}

fn prompts_that_share_states_go_on_as_each_does_alone(device: &Device) {
    let (model, _) = model(&fixtures().join("models/qwen3_5"), device);
    let prompt = |own: u32| (0..40).map(|i| i * 7 % 61 + 3).chain([own, own + 1, 9]);
    let prompts = [11, 20, 31].map(|own| prompt(own).collect::<Vec<u32>>());
    let asked = Asked { temperature: 0.0, new: 6, n: 2, ..DRAWN };
    let limits = SchedulerConfig::new(64);
    let shared = run(&model, &prompts, asked, &limits);
    assert_eq!(shared.stats.prefix_cache_hits, 2 * 32);
    let alone = prompts.iter().map(|prompt| run(&model, std::slice::from_ref(prompt), asked, &limits));
    let alone: Vec<Generated> = alone.collect();
    assert!(alone.iter().all(|own| own.stats.prefix_cache_hits == 0));
    let alone: Vec<Sample> = alone.into_iter().flat_map(|own| own.samples).collect();
    assert_within(&shared.samples, &alone, LINEAR_ATTENTION);
}

fn weights_in_8_bits_draw_what_a_model_of_those_numbers_draws(device: &Device) {
    let dir = fixtures().join("models/qwen2-tied");
    let (here, _) = model(&dir, device);
    let mut rounded = Model::load(&dir);
    let exact = rounded.decoder.clone();
    rounded.decoder = in_8_bits(&exact);
    // the last prompt is of many rows, for which a GPU widens matrices as a whole
    let many = kernels::table(Backend::Wgpu).quantized(false).max_fused_rows as u32 + 9;
    let long: Vec<u32> = (0..many).map(|i| i * 7 % 61 + 3).collect();
    let prompts = [PROMPTS[0].to_vec(), PROMPTS[1].to_vec(), long];
    let limits = [SchedulerConfig::new(64), SchedulerConfig { max_num_batched_tokens: 16, ..SchedulerConfig::new(2) }];
    for limits in &limits {
        let expected = generate(&rounded, &prompts, DRAWN, limits);
        let prepack = Prepack { quantization: Some(Quantization::Int8), ..Prepack::default() };
        let found = run_packed(&here, &prompts, DRAWN, limits, prepack).samples;
        assert_same(&found, &expected);
        let trained = generate(&here, &prompts, DRAWN, limits);
        assert!(found.iter().zip(&trained).any(|(a, b)| a.logps != b.logps));
    }
}

pub(super) const PROMPTS: [&[u32]; 2] = [&[7, 41, 68], &[7, 47, 18, 66, 71]];

/// Drawn from the whole distribution.
pub(super) const DRAWN: Asked = Asked { temperature: 1.0, new: 12, n: 3, kept: None, stop_ids: 0 };

/// Drawn from the likeliest tokens, by all three kinds of truncation.
pub(super) const TRUNCATED: Asked = Asked { temperature: 0.8, kept: Some((20, 0.9, 0.01)), ..DRAWN };

#[track_caller]
pub(super) fn assert_same(found: &[Sample], expected: &[Sample]) {
    assert_within(found, expected, F32_ELSEWHERE);
}

#[track_caller]
fn assert_within(found: &[Sample], expected: &[Sample], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert_eq!(a.tokens, b.tokens, "sample {} of prompt {}", a.sample, a.request);
        let [a, b] = [a, b].map(|s| s.logps.iter().chain(&s.full_logps));
        for (a, b) in a.zip(b) {
            assert_close("log-prob", f64::from(*a), f64::from(*b), tolerance);
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Asked {
    pub temperature: f64,
    /// Most new tokens.
    pub new: usize,
    /// Samples a prompt.
    pub n: usize,
    /// Top-k, top-p and min-p, where tokens are left out.
    pub kept: Option<(usize, f64, f64)>,
    /// The first so many tokens end a completion.
    pub stop_ids: u32,
}

pub(super) fn generate(model: &Model, prompts: &[Vec<u32>], asked: Asked, limits: &SchedulerConfig) -> Vec<Sample> {
    run(model, prompts, asked, limits).samples
}

fn run(model: &Model, prompts: &[Vec<u32>], asked: Asked, limits: &SchedulerConfig) -> Generated {
    run_packed(model, prompts, asked, limits, Prepack::default())
}

fn run_packed(
    model: &Model,
    prompts: &[Vec<u32>],
    asked: Asked,
    limits: &SchedulerConfig,
    prepack: Prepack,
) -> Generated {
    run_captured(model, prompts, asked, limits, prepack, &[])
}

/// With decoding steps of these numbers of rows captured as graphs.
pub(super) fn run_captured(
    model: &Model,
    prompts: &[Vec<u32>],
    asked: Asked,
    limits: &SchedulerConfig,
    prepack: Prepack,
    capture_sizes: &[usize],
) -> Generated {
    let (top_p, min_p) = asked.kept.map_or((1.0, 0.0), |(_, p, m)| (p, m));
    let sampling = SamplingParams {
        temperature: asked.temperature,
        top_k: asked.kept.map(|(k, ..)| k),
        top_p,
        min_p,
        max_new_tokens: asked.new,
        stop_ids: (0..asked.stop_ids).collect(),
        ..SamplingParams::default()
    };
    let request = |(draw, tokens): (usize, &Vec<u32>)| GenerationRequest {
        tokens: tokens.clone(),
        key: DrawKey { seed: 3, step: 0, prompt_index: draw as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = prompts.iter().enumerate().map(request).collect();
    let generator = Generator::new(&model.decoder, None, &sampling).expect("sampling that works");
    let generator = generator.prepack(prepack).capture_sizes(capture_sizes);
    let generated = generator.run_with(&requests, asked.n, limits, |_| {});
    generated.expect("samples")
}
