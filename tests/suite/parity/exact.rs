//! Log-probs of the sampler and of the trainer are the same bits on the CPU, however sequences are batched.

use crate::support::model::Model;
use crate::support::{checked, device, fixtures, folders};
use firebrick_engine::plan::{Layout, ModelPlan};
use firebrick_engine::sequence::Sequence;
use firebrick_models::random::DrawKey;
use firebrick_models::{Arch, Decoder, Prepack};
use firebrick_sampler::{Generated, GenerationRequest, Generator, SamplingParams, SchedulerConfig};
use serde_json::{Value, json};
use std::path::Path;

const PANELS: Prepack = Prepack { panels: true, quantization: None };

#[test]
fn every_family_samples_with_the_log_probs_that_training_scores() {
    let mut tokens = 0;
    for dir in folders("models") {
        let model = Model::load(&dir);
        // sampling and training have two forms of the delta rule, and some rotary embeddings depend on the longest sequence
        if model.decoder.arch().delta_net.is_none() && model.manifest.is_local() {
            tokens += compare(&model, 11, 6, 32);
        }
    }
    checked("tokens of all families", tokens);
}

/// More inputs than one chain of additions has, and more tokens than one chain of values.
#[test]
fn parts_of_inputs_and_of_long_sequences_are_added_in_one_order() {
    let mut tokens = 0;
    for (family, window) in [("gemma2", Some(90)), ("qwen2", None)] {
        let Value::Object(config) = json!({
            "model_type": family, "vocab_size": 61, "hidden_size": 520, "intermediate_size": 1040,
            "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
            "sliding_window": window, "max_position_embeddings": 2048, "initializer_range": 0.04,
            "attn_logit_softcapping": 20.0, "final_logit_softcapping": 20.0, "query_pre_attn_scalar": 24
        }) else {
            unreachable!("an object")
        };
        let arch = Arch::from_config(&config, Path::new(family)).expect("a valid architecture");
        let mut model = Model::load(&fixtures().join("models/qwen2-tied"));
        model.decoder = Decoder::random(arch, 1, &device());
        model.name = format!("random {family}");
        tokens += compare(&model, 70, 80, 16);
    }
    checked("tokens of long sequences", tokens);
}

/// How completions are sampled.
#[derive(Clone, Copy, Debug)]
struct Run {
    limits: SchedulerConfig,
    prepack: Prepack,
    temperature: f64,
    top_p: f64,
}

/// Compares log-probs of completions of ragged prompts, some with a common beginning of `system` tokens, under several
/// schedules and layouts of training; gives the number of tokens.
fn compare(model: &Model, system: usize, own: usize, new: usize) -> usize {
    let arch = model.decoder.arch();
    let token = |i: usize, salt: usize| ((i * 7919 + salt * 104_729) % (arch.vocab_size - 3) + 3) as u32;
    let prompt = |(salt, (system, own)): (usize, (usize, usize))| -> Vec<u32> {
        (0..system).map(|i| token(i, 97)).chain((0..own).map(|i| token(i, salt))).collect()
    };
    let lengths = [(system, own), (system, 3), (0, 1), (0, own + 5)];
    let prompts: Vec<Vec<u32>> = lengths.into_iter().enumerate().map(prompt).collect();
    let longest = system + own + 5 + new;
    let all = SchedulerConfig::new(64);
    let chunked = SchedulerConfig { max_num_batched_tokens: 7, ..SchedulerConfig::new(5) };
    let least = SchedulerConfig::new(6).least_cache_bytes(arch, longest);
    let short = SchedulerConfig { kv_cache_bytes: Some(2 * least), ..SchedulerConfig::new(6) };
    let plain = Prepack::default();
    let runs = [
        Run { limits: all, prepack: PANELS, temperature: 0.8, top_p: 1.0 },
        Run { limits: SchedulerConfig::new(1), prepack: plain, temperature: 1.0, top_p: 1.0 },
        Run { limits: chunked, prepack: plain, temperature: 1.0, top_p: 0.9 },
        Run { limits: short, prepack: PANELS, temperature: 1.0, top_p: 1.0 },
    ];
    let mut tokens = 0;
    let mut preemptions = 0;
    for run in runs {
        let generated = sample(model, &prompts, new, run);
        preemptions += generated.stats.preemptions;
        let whole = |s: &firebrick_sampler::Sample| Sequence::completion(&prompts[s.request], &s.tokens);
        let rows: Vec<Sequence> = generated.samples.iter().map(whole).collect();
        let sampled: Vec<&[f32]> = generated.samples.iter().map(|s| &s.full_logps[..]).collect();
        for (layout, head_rows, apart) in
            [(Layout::Packed, 1024, false), (Layout::SharedPrefix, 7, false), (Layout::Padded, 64, true)]
        {
            let plan = ModelPlan { layout, ..model.plain(head_rows) };
            let score = |rows: &[Sequence]| model.score(&plan, run.temperature, rows).logp;
            let scored: Vec<Vec<f32>> = if apart {
                rows.iter().flat_map(|row| score(std::slice::from_ref(row))).collect()
            } else {
                score(&rows)
            };
            let label = format!("{}: {run:?}, {layout:?}, {head_rows} rows of the head", model.name);
            tokens += assert_bits(&label, &sampled, &scored);
        }
    }
    // a window returns blocks before any is missing
    let windowed = arch.windows.iter().all(Option::is_some);
    assert!(preemptions > 0 || windowed, "{}: no sequence was preempted", model.name);
    tokens
}

/// Compares log-probs by their bits; gives their number.
fn assert_bits(label: &str, sampled: &[&[f32]], scored: &[Vec<f32>]) -> usize {
    assert_eq!(sampled.len(), scored.len());
    let mut differing = Vec::new();
    let mut tokens = 0;
    for (sequence, (sampled, scored)) in sampled.iter().zip(scored).enumerate() {
        assert_eq!(sampled.len(), scored.len());
        tokens += sampled.len();
        let pairs = sampled.iter().zip(scored).enumerate();
        differing.extend(pairs.filter(|(_, (a, b))| a.to_bits() != b.to_bits()).map(|(i, ab)| (sequence, i, ab)));
    }
    assert!(
        differing.is_empty(),
        "{label}: {} of {tokens}, first {:?}",
        differing.len(),
        &differing[..differing.len().min(9)]
    );
    tokens
}

fn sample(model: &Model, prompts: &[Vec<u32>], new: usize, run: Run) -> Generated {
    let sampling = SamplingParams {
        temperature: run.temperature,
        top_p: run.top_p,
        max_new_tokens: new,
        stop_ids: (0..2).collect(),
        ..SamplingParams::default()
    };
    let request = |(draw, tokens): (usize, &Vec<u32>)| GenerationRequest {
        tokens: tokens.clone(),
        key: DrawKey { seed: 3, step: 0, prompt_index: draw as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = prompts.iter().enumerate().map(request).collect();
    let generator = Generator::new(&model.decoder, None, &sampling).expect("settings that work");
    generator.prepack(run.prepack).run_with(&requests, 2, &run.limits, |_| {}).expect("samples")
}
