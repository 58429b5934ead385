//! `rollout.exact`: the sampler's log-probs are the trainer's to the bit, whatever is computed beside a token.

use super::on_devices;
use super::quantized_base::adapted;
use super::rollout::{Asked, DRAWN, TRUNCATED, run_captured};
use super::training::{TRAINING, metrics, name};
use crate::support::model::Model;
use crate::support::{checked, folders};
use burn::tensor::Device;
use firebrick_backends::device::is_cpu;
use firebrick_backends::{Precision, PrecisionExt};
use firebrick_engine::config::parse;
use firebrick_engine::plan::MemoryConfig;
use firebrick_engine::sequence::Sequence;
use firebrick_engine::trainer::Trainer;
use firebrick_models::{Arch, Decoder, Prepack};
use firebrick_sampler::{Sample, SchedulerConfig};
use serde_json::{Map, Value, json};
use std::path::Path;

on_devices! {
    sampled_log_probs_are_those_of_training_to_the_bit_for_every_family,
    limits_of_the_engine_and_captured_graphs_change_no_bit,
    a_vocabulary_of_several_tiles_is_scored_as_one_of_whole_rows,
    other_heads_odd_matrices_and_adapters_are_exact,
    a_run_has_ratios_of_one_and_no_pass_for_old_log_probs,
    what_cannot_be_exact_is_refused_with_the_reason,
}

/// Numbers of a head that tensor cores take too.
const HEAD: usize = 64;

/// The configuration of a fixture's model with wider heads and some keys changed.
fn config(dir: &Path, changes: Value) -> Map<String, Value> {
    let text = std::fs::read_to_string(dir.join("config.json")).expect("a configuration");
    let Value::Object(mut config) = serde_json::from_str(&text).expect("JSON") else { unreachable!("an object") };
    // of a model that also reads images, the part for text
    if let Some(Value::Object(text)) = config.remove("text_config") {
        config = text;
    }
    config.insert("head_dim".into(), json!(HEAD));
    // families without a size of heads divide the hidden size
    let narrow = Arch::from_config(&config, dir).is_ok_and(|arch| arch.head_dim != HEAD);
    if let (true, Some(heads)) = (narrow, config.get("num_attention_heads").and_then(Value::as_u64)) {
        config.insert("hidden_size".into(), json!(HEAD as u64 * heads));
    }
    config.insert("initializer_range".into(), json!(0.2));
    let Value::Object(changes) = changes else { unreachable!("an object") };
    config.extend(changes);
    config
}

/// A random model of a fixture's family with some keys changed, computed exactly; the reason where it is not.
fn exact_model(dir: &Path, changes: Value, precision: Precision, device: &Device) -> Result<Model, String> {
    exact_model_with_adapters(dir, changes, None, precision, device)
}

/// [`exact_model`] with random adapters of a rank.
fn exact_model_with_adapters(
    dir: &Path,
    changes: Value,
    rank: Option<usize>,
    precision: Precision,
    device: &Device,
) -> Result<Model, String> {
    let mut model = Model::load(dir);
    let arch = Arch::from_config(&config(dir, changes), dir).expect("a known family").in_precision(precision);
    let decoder = Decoder::random(arch, 1, device);
    let decoder = rank.map_or(decoder.clone(), |rank| adapted(&decoder, rank));
    model.decoder = decoder.with_exact_sums().map_err(|error| error.to_string())?;
    Ok(model)
}

/// The precisions in which a device is exact: f32, and on GPUs half precision.
fn precisions(device: &Device) -> Vec<Precision> {
    Precision::ALL.into_iter().filter(|p| (!p.is_half() || !is_cpu(device)) && p.check(device).is_ok()).collect()
}

/// [`precisions`] without a second half precision, which is as the first.
fn different_precisions(device: &Device) -> impl Iterator<Item = Precision> {
    let mut halves = 0;
    precisions(device).into_iter().filter(move |p| {
        halves += usize::from(p.is_half());
        !p.is_half() || halves == 1
    })
}

/// Prompts that end within a tile of keys, in the one behind it, and at its end; the first two begin alike.
fn prompts() -> Vec<Vec<u32>> {
    let prompt =
        |length: u32, own: u32| (0..length).map(|i| if i < 40 { i * 7 % 61 + 3 } else { i * own % 59 + 3 }).collect();
    vec![prompt(70, 5), prompt(44, 11), vec![7, 47, 18, 66, 71], prompt(128, 3)]
}

/// Checks samples against scores of training under several plans.
fn assert_exact(model: &Model, prompts: &[Vec<u32>], asked: Asked, samples: &[Sample], label: &str) {
    let rows: Vec<Sequence> = samples
        .iter()
        .map(|sample| Sequence { routes: None, ..Sequence::completion(&prompts[sample.request], &sample.tokens) })
        .collect();
    let settings = [
        MemoryConfig { head_rows: 7, ..MemoryConfig::default() },
        MemoryConfig { share_prefix: true, gradient_checkpointing: true, ..MemoryConfig::default() },
    ];
    for memory in settings {
        let plan = memory.plan(model.decoder.arch()).expect("a plan");
        let together = model.score(&plan, asked.temperature, &rows).logp;
        for (sample, (row, together)) in samples.iter().zip(rows.iter().zip(&together)) {
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            let place = format!("{label}: sample {} of prompt {}", sample.sample, sample.request);
            assert_eq!(bits(&sample.full_logps), bits(together), "{place}, {memory:?}");
            if sample.sample == 0 {
                let alone = model.score(&plan, asked.temperature, std::slice::from_ref(row)).logp;
                assert_eq!(bits(&sample.full_logps), bits(&alone[0]), "{place}, alone");
            }
        }
    }
}

fn sampled_log_probs_are_those_of_training_to_the_bit_for_every_family(device: &Device) {
    let mut models = 0;
    for precision in different_precisions(device) {
        for dir in folders("models") {
            let model = exact_model(&dir, json!({}), precision, device).expect("it is computed exactly");
            // their angles depend on the longest sequence of a batch
            if model.name == "llama-rope-dynamic" {
                continue;
            }
            // a software GPU takes a second for a step
            let new = if is_cpu(device) { DRAWN.new } else { 3 };
            let asked = Asked { temperature: 0.7, new, n: 2, ..DRAWN };
            let samples =
                run_captured(&model, &prompts(), asked, &SchedulerConfig::new(64), Prepack::default(), &[]).samples;
            assert_exact(&model, &prompts(), asked, &samples, &format!("{} in {precision}", model.name));
            models += 1;
        }
    }
    checked("models whose samples are exact", models);
}

fn limits_of_the_engine_and_captured_graphs_change_no_bit(device: &Device) {
    for (precision, name) in different_precisions(device).flat_map(|p| ["mistral-window", "llama-gqa"].map(|n| (p, n)))
    {
        let dir = crate::support::fixtures().join("models").join(name);
        let model = exact_model(&dir, json!({}), precision, device).expect("it is computed exactly");
        let asked = Asked { temperature: 0.7, new: 5, n: 2, ..TRUNCATED };
        let least = SchedulerConfig::new(4).least_cache_bytes(model.decoder.arch(), 128 + asked.new);
        let chunked = SchedulerConfig { max_num_batched_tokens: 24, ..SchedulerConfig::new(3) };
        let short = SchedulerConfig { kv_cache_bytes: Some(least), ..SchedulerConfig::new(4) };
        let run = |limits: &SchedulerConfig, captured: &[usize]| {
            let prepack = Prepack { panels: true, quantization: None };
            let generated = run_captured(&model, &prompts(), asked, limits, prepack, captured);
            let numbers = |sample: &Sample| {
                let bits =
                    [&sample.logps, &sample.full_logps].map(|l| l.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
                (sample.tokens.clone(), bits)
            };
            (generated.samples.iter().map(numbers).collect::<Vec<_>>(), generated)
        };
        let (expected, plain) = run(&SchedulerConfig::new(64), &[]);
        assert_exact(&model, &prompts(), asked, &plain.samples, name);
        for (limits, captured) in [(chunked, &[2, 3][..]), (short, &[])] {
            let (found, generated) = run(&limits, captured);
            assert_eq!(found, expected, "{name}: {limits:?}");
            let preempts = limits.kv_cache_bytes.is_some() && name == "llama-gqa";
            assert!(!preempts || generated.stats.preemptions > 0, "{:?}", generated.stats);
        }
    }
}

fn a_vocabulary_of_several_tiles_is_scored_as_one_of_whole_rows(device: &Device) {
    for precision in precisions(device).into_iter().rev().take(1) {
        let dir = crate::support::fixtures().join("models/llama-gqa");
        // the last tile has 130 tokens
        let changes = json!({"vocab_size": 2 * 8192 + 130, "num_hidden_layers": 1});
        let model = exact_model(&dir, changes, precision, device).expect("it is computed exactly");
        let asked = Asked { temperature: 0.7, new: 3, n: 2, ..DRAWN };
        let prompts = [vec![7, 47, 18], vec![7, 16_500, 71]];
        let samples = run_captured(&model, &prompts, asked, &SchedulerConfig::new(64), Prepack::default(), &[]).samples;
        assert_exact(&model, &prompts, asked, &samples, "tiles");
    }
}

fn other_heads_odd_matrices_and_adapters_are_exact(device: &Device) {
    let of_layer = |more: Value| {
        let mut changes = json!({"num_hidden_layers": 1});
        changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        changes
    };
    for precision in different_precisions(device) {
        let dir = crate::support::fixtures().join("models/llama-gqa");
        for (changes, rank) in [
            (json!({"head_dim": 96}), 8),
            // of tensor cores' kernels none takes such heads, or so many for a key head
            (json!({"head_dim": 256}), 8),
            (json!({"num_attention_heads": 20, "num_key_value_heads": 1}), 8),
            // and tiles take multiples of eight inputs and two outputs
            (json!({"head_dim": 128, "intermediate_size": 44, "vocab_size": 77}), 4),
        ] {
            let label = format!("{changes} and adapters of rank {rank}");
            let model = exact_model_with_adapters(&dir, of_layer(changes), Some(rank), precision, device);
            let model = model.expect("it is computed exactly");
            let asked = Asked { temperature: 0.7, new: 3, n: 2, ..DRAWN };
            let samples =
                run_captured(&model, &prompts(), asked, &SchedulerConfig::new(64), Prepack::default(), &[]).samples;
            assert_exact(&model, &prompts(), asked, &samples, &label);
        }
    }
}

fn a_run_has_ratios_of_one_and_no_pass_for_old_log_probs(device: &Device) {
    for precision in different_precisions(device) {
        let temp = tempfile::tempdir().unwrap();
        // the default on the CPU
        let exact = if is_cpu(device) { "null" } else { "true" };
        let overrides = [
            format!("output={}", temp.path().join("run").display()),
            format!("device={}", name(device)),
            format!("precision={precision}"),
            format!("model.arch.head_dim={HEAD}"),
            format!("rollout.exact={exact}"),
        ];
        let mut trainer = Trainer::builder(parse(TRAINING, &overrides).unwrap()).build().unwrap();
        trainer.run().unwrap();
        let lines = metrics(&temp.path().join("run"));
        assert_eq!(lines.len(), 4);
        for line in &lines[1..] {
            let of = |key: &str| line.get(key).map(|value| value.as_f64().expect("a number").to_bits());
            assert_eq!(of("training/rollout_probs_diff_max"), Some(0), "{line:?}");
            assert_eq!(of("actor/ppo_kl"), Some(0), "{line:?}");
            assert_eq!(of("timing_s/old_log_prob"), None, "{line:?}");
        }
    }
}

fn what_cannot_be_exact_is_refused_with_the_reason(device: &Device) {
    let dir = crate::support::fixtures().join("models/llama-gqa");
    let refused = |changes: Value, precision: Precision| {
        let arch = Arch::from_config(&config(&dir, changes), &dir).expect("a known family");
        let refused = Decoder::random(arch.in_precision(precision), 1, device).with_exact_sums();
        refused.expect_err("it cannot be exact").to_string()
    };
    let (changes, precision, about) = if is_cpu(device) {
        (json!({}), Precision::Bf16, "this model has heads of 64 and 2 for a key head, in bf16")
    } else {
        let heads = json!({"head_dim": 8, "num_attention_heads": 65, "num_key_value_heads": 1});
        (heads, Precision::F32, "this model has heads of 8 and 65 for a key head")
    };
    let why = refused(changes, precision);
    let needs = "needs f32 on the CPU, or a GPU with its kernels on and up to 64 query heads for a key head";
    assert!(why.contains(needs) && why.contains(about), "{why}");
}
