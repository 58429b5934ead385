//! The same numbers on wgpu: WGSL kernels on whatever adapter there is, Mesa's software Vulkan in CI.
//!
//! One device and one test at a time: kernels are compiled once a process, and a software adapter has the same
//! cores as the tests.

use crate::plans;
use crate::support::golden::Golden;
use crate::support::model::{Model, nll_rows, scored_rows};
use crate::support::techniques::{MOMENTS, optimizers, passes};
use crate::support::{
    assert_all_close, assert_close, assert_gradient, checked, fixtures, folders, report,
};
use burn::tensor::Device;
use firebrick_backends::device::open;
use firebrick_engine::config::parse;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::trainer::{Silent, Start, Trainer};
use firebrick_engine::trainer_state::Mode;
use firebrick_models::Checkpoint;
use firebrick_models::generate::{Generator, Request, Sample, Sampling};
use firebrick_models::random::DrawKey;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::{Mutex, MutexGuard};

/// Another order of summation than the CPU's, the same precision.
const TOLERANCE: f64 = 1e-4;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The adapter, held alone. `None` where there is none, unless `FIREBRICK_REQUIRE_WGPU=1` makes that a failure.
pub(super) fn adapter() -> Option<(Device, MutexGuard<'static, ()>)> {
    let guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    match open("wgpu".parse().unwrap()) {
        Ok((device, _)) => Some((device, guard)),
        Err(error) => {
            let required = std::env::var("FIREBRICK_REQUIRE_WGPU").is_ok_and(|v| v == "1");
            assert!(!required, "FIREBRICK_REQUIRE_WGPU=1: {error}");
            report(&format!("not run: {error}"));
            None
        }
    }
}

fn model(dir: &Path, device: &Device) -> (Model, Golden) {
    let mut model = Model::load(dir);
    model.decoder = Checkpoint::open(dir).unwrap().load(device).unwrap();
    let golden = model.golden("forward.safetensors");
    (model, golden)
}

#[test]
fn parity_of_log_probs_and_entropies() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let mut rows = 0;
    for dir in folders("models") {
        let (model, golden) = model(&dir, &device);
        let name = model.name.as_str();
        let sequences = scored_rows(&golden);
        let scores = model.score(&model.plain(1024), 1.0, &sequences);
        let (logp, entropy) = (
            golden.float_rows("logprobs_right"),
            golden.float_rows("entropy_right"),
        );
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        for (i, sequence) in sequences.iter().enumerate() {
            let n = sequence.tokens.len();
            assert_all_close(
                name,
                &wide(&scores.logp[i][..n - 1]),
                &logp[i][..n - 1],
                TOLERANCE,
            );
            assert_all_close(name, &wide(&scores.entropy[i]), &entropy[i][..n], TOLERANCE);
            rows += 1;
        }
    }
    checked("rows of log-probs and entropies on wgpu", rows);
}

#[test]
fn parity_of_losses_and_gradients_with_and_without_checkpointing() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let mut tensors = 0;
    for dir in folders("models") {
        let (model, golden) = model(&dir, &device);
        let name = model.name.as_str();
        let rows = nll_rows(&golden);
        let Some(expected) = model.golden_gradients() else {
            continue;
        };
        for plan in [model.plain(1024), model.checkpointed(1024, 1)] {
            let whole = vec![rows.iter().collect()];
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &whole);
            assert_close(name, sums.loss, model.manifest.loss.unwrap(), TOLERANCE);
            for (parameter, found) in &found {
                let label = format!("{name}: {parameter}");
                assert_gradient(&label, found, &expected.floats(parameter), TOLERANCE);
                tensors += 1;
            }
        }
    }
    checked("gradient tensors on wgpu", tensors);
}

#[test]
fn every_plan_gives_the_loss_and_gradients_of_the_plain_one() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let (model, _) = model(&fixtures().join("models/qwen2-tied"), &device);
    let cases = plans::compare_passes(&model, &passes());
    checked("plans against the plain one on wgpu", cases);
}

#[test]
fn every_place_of_the_optimizer_gives_the_weights_of_the_plain_one() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let (model, _) = model(&fixtures().join("models/llama-gqa"), &device);
    let places: Vec<_> = optimizers().into_iter().step_by(3).collect();
    // WGSL stores no bf16: that kind is refused there
    let cases =
        plans::compare_updates(&model, &places) + plans::compare_moments(&model, &MOMENTS[1..]);
    checked("places and kinds of moments on wgpu", cases);
}

#[test]
fn parity_of_greedy_continuations() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let mut samples = 0;
    for dir in folders("models") {
        let (model, _) = model(&dir, &device);
        if !model.manifest.is_local() {
            continue;
        }
        let name = model.name.as_str();
        let greedy = model.manifest.greedy.as_ref().unwrap();
        let prompts: Vec<Vec<u32>> = greedy
            .samples
            .iter()
            .map(|s| s.prompt_ids.clone())
            .collect();
        let found = generate(&model, &prompts, 0.0, greedy.max_new_tokens, 1);
        for (found, expected) in found.iter().zip(&greedy.samples) {
            assert_eq!(found.tokens, expected.new_ids, "{name}");
            samples += 1;
        }
    }
    checked("greedy continuations on wgpu", samples);
}

#[test]
fn draws_are_those_of_the_cpu() {
    let Some((device, _alone)) = adapter() else {
        return;
    };
    let (on_wgpu, _) = model(&fixtures().join("models/llama-gqa"), &device);
    let on_cpu = Model::load(&on_wgpu.dir);
    let prompts = [vec![507, 41, 68], vec![507, 47, 318, 266, 471]];
    let sample = |model: &Model| generate(model, &prompts, 1.0, 12, 3);
    for (a, b) in sample(&on_wgpu).iter().zip(&sample(&on_cpu)) {
        assert_eq!(
            a.tokens, b.tokens,
            "sample {} of prompt {}",
            a.sample, a.request
        );
        for (a, b) in a.logps.iter().zip(&b.logps) {
            assert_close("log-prob", f64::from(*a), f64::from(*b), TOLERANCE);
        }
    }
}

fn generate(
    model: &Model,
    prompts: &[Vec<u32>],
    temperature: f64,
    new: usize,
    n: usize,
) -> Vec<Sample> {
    let sampling = Sampling {
        temperature,
        max_new_tokens: new,
        ..Sampling::default()
    };
    let request = |(draw, tokens): (usize, &Vec<u32>)| Request {
        tokens: tokens.clone(),
        key: DrawKey {
            seed: 3,
            step: 0,
            draw: draw as u32,
            sample: 0,
        },
    };
    let requests: Vec<Request> = prompts.iter().enumerate().map(request).collect();
    Generator::new(&model.decoder, None, &sampling)
        .unwrap()
        .run(&requests, n, 64)
        .unwrap()
}

#[test]
fn three_steps_of_training_follow_the_cpu() {
    let Some((_device, _alone)) = adapter() else {
        return;
    };
    let temp = tempfile::tempdir().unwrap();
    let run = |device: &str| {
        let output = temp.path().join(device);
        let overrides = [
            format!("output={}", output.display()),
            format!("device={device}"),
        ];
        let config = parse(TRAINING, &overrides).unwrap();
        let mut trainer = Trainer::new(config, Mode::Rl, Start::Fresh, Box::new(Silent)).unwrap();
        assert_eq!(trainer.run().unwrap().steps, 3);
        metrics(&output)
    };
    let (wgpu, cpu) = (run("wgpu"), run("cpu"));
    assert_eq!(wgpu.len(), 4);
    for (a, b) in wgpu.iter().zip(&cpu).skip(1) {
        for key in [
            "actor/pg_loss",
            "actor/kl_loss",
            "actor/entropy",
            "actor/grad_norm",
            "critic/rewards/mean",
        ] {
            let value = |line: &Map<String, Value>| line[key].as_f64().unwrap();
            assert_close(key, value(a), value(b), 1e-3);
        }
        assert!(
            a["actor/grad_norm"].as_f64().unwrap() > 0.0,
            "a step that learns nothing shows nothing"
        );
    }
}

fn metrics(run: &Path) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Partial rewards and a warm-up, so that groups have some spread and every step a gradient.
const TRAINING: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
         max_position_embeddings: 16}
task: {kind: arithmetic, difficulty: 1, validation_size: 4, partial: true}
output: run
warmup: {sft: {steps: 2, batch_size: 8, optim: {lr: 3.0e-2}}}
objective: {kl_loss_coef: 0.1}
rollout: {n: 8, prompt_length: 4, response_length: 3}
optim: {lr: 1.0e-2}
trainer: {steps: 3, train_batch_size: 8, seed: 5}
";
