//! Training follows the CPU: over replayed rollouts, and as a whole run.

use super::{model, on_devices};
use crate::support::model::{Model, scored_rows};
use crate::support::tolerance::F32_UPDATE;
use crate::support::{assert_close, checked, fixtures};
use burn::tensor::Device;
use firebrick_backends::device::{Backend, DeviceSpec, is_cpu};
use firebrick_engine::config::parse;
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::ObjectiveConfig;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::sequence::Sequence;
use firebrick_engine::trainer::Trainer;
use firebrick_models::random::Stream;
use serde_json::{Map, Value};
use std::path::Path;

on_devices! {
    twenty_steps_of_grpo_on_replayed_rollouts_have_the_losses_of_the_cpu,
    three_steps_of_training_follow_the_cpu,
    a_run_repeats_to_the_bit,
}

/// Rollouts as if sampled from a model near this one: the golden rows, their first tokens a prompt, with advantages,
/// old and reference log-probs drawn by `salt`.
pub(super) fn rollouts(model: &Model, salt: u64) -> Vec<Sequence> {
    let mut rows = scored_rows(&model.golden("forward.safetensors"));
    let mut random = Stream::new(11, salt);
    for row in &mut rows {
        row.positions.pop();
        row.positions.drain(..2);
        let tokens = row.positions.len();
        let advantage = f64::from(random.normal());
        row.columns.advantage = Some(vec![advantage; tokens]);
        row.columns.weight = Some(vec![0.05; tokens]);
    }
    let scores = model.score(&model.plain(64), 1.0, &rows);
    for (row, logp) in rows.iter_mut().zip(scores.logp) {
        let mut near = || {
            let all = logp.iter().map(|l| f64::from(l + 0.1 * random.normal()));
            Some(all.collect::<Vec<f64>>())
        };
        row.columns.old_logp = near();
        row.columns.ref_logp = near();
        row.columns.full_logp.clone_from(&row.columns.old_logp);
    }
    rows
}

/// Losses and gradient norms of twenty optimizer steps over four batches that come again and again.
fn curve(model: &Model, batches: &[Vec<Sequence>]) -> Vec<[f64; 2]> {
    let objective = ObjectiveConfig { kl_loss_coef: 0.1, ..ObjectiveConfig::default() }.build().expect("an objective");
    let optim = OptimConfig { lr: 3e-4, eps: 1e-5, ..OptimConfig::default() };
    let runtime = Runtime::new(model.decoder.device());
    let plan = model.plain(64);
    let mut learner = Learner::new(model.decoder.clone(), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    let steps = (0..20).map(|step| {
        let rows = &batches[step % batches.len()];
        let updated = learner.update(rows, 1.0, &objective, 3e-4).expect("an update");
        assert!(updated.outcome.applied);
        [updated.sums.loss, updated.outcome.grad_norm]
    });
    steps.collect()
}

fn twenty_steps_of_grpo_on_replayed_rollouts_have_the_losses_of_the_cpu(device: &Device) {
    let (here, _) = model(&fixtures().join("models/qwen2-tied"), device);
    let on_cpu = Model::load(&here.dir);
    let batches: Vec<_> = (0..4).map(|salt| rollouts(&on_cpu, salt)).collect();
    let (found, expected) = (curve(&here, &batches), curve(&on_cpu, &batches));
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        for (what, a, b) in [("loss", found[0], expected[0]), ("norm", found[1], expected[1])] {
            assert_close(&format!("step {step}: {what}"), a, b, F32_UPDATE);
        }
    }
    let moved = (expected[0][0] - expected[16][0]).abs();
    assert!(moved > 1e-2, "the loss of the first batch stays: {expected:?}");
    checked("steps on replayed rollouts", found.len());
}

/// How a configuration names a device of these tests.
pub(super) fn name(device: &Device) -> &'static str {
    let other = |backend: &Backend| {
        let spec = DeviceSpec::Named { backend: *backend, index: 0 };
        let opened = firebrick_backends::device::open(spec);
        opened.is_ok_and(|(found, _)| found == *device)
    };
    if is_cpu(device) {
        return Backend::Cpu.name();
    }
    let found = [Backend::Wgpu, Backend::Cuda].iter().find(|b| other(b));
    found.expect("a device of these tests").name()
}

/// Trains for three steps into a folder.
fn train(output: &Path, device: &str) {
    let overrides = [format!("output={}", output.display()), format!("device={device}")];
    let config = parse(TRAINING, &overrides).unwrap();
    let mut trainer = Trainer::builder(config).build().unwrap();
    assert_eq!(trainer.run().unwrap().steps, 3);
}

fn a_run_repeats_to_the_bit(device: &Device) {
    let temp = tempfile::tempdir().unwrap();
    let runs = ["first", "second"].map(|run| temp.path().join(run));
    for run in &runs {
        train(run, name(device));
    }
    let read = |file: &str| runs.each_ref().map(|run| std::fs::read(run.join(file)).unwrap());
    for file in [
        "samples.jsonl",
        "checkpoints/step-000003/model/model.safetensors",
        "checkpoints/step-000003/trainer/optimizer.safetensors",
    ] {
        let [first, second] = read(file);
        assert!(!first.is_empty() && first == second, "{file} differs");
    }
}

fn three_steps_of_training_follow_the_cpu(device: &Device) {
    let temp = tempfile::tempdir().unwrap();
    let run = |device: &str| {
        let output = temp.path().join(device);
        train(&output, device);
        metrics(&output)
    };
    let here = run(name(device));
    let cpu = if is_cpu(device) { here.clone() } else { run("cpu") };
    assert_eq!(here.len(), 4);
    for (a, b) in here.iter().zip(&cpu).skip(1) {
        for key in ["actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean"] {
            let value = |line: &Map<String, Value>| line[key].as_f64().unwrap();
            assert_close(key, value(a), value(b), 1e-3);
        }
        assert!(a["actor/grad_norm"].as_f64().unwrap() > 0.0, "a step that learns nothing shows nothing");
    }
}

pub(super) fn metrics(run: &Path) -> Vec<Map<String, Value>> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Partial rewards and a warm-up, so that groups have some spread and every step a gradient.
pub(super) const TRAINING: &str = "
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
