//! bf16 and f16: parameters and activations in two bytes, everything that adds up in f32. Each device runs the
//! precisions that it computes in and refuses the others by name.

use super::{model_in, on_devices};
use crate::support::golden::Golden;
use crate::support::model::{Model, in_8_bits, nll_rows, scored_rows};
use crate::support::techniques::Technique;
use crate::support::tolerance::{F32_ELSEWHERE, spacing};
use crate::support::{assert_close, checked, fixtures, folders};
use burn::tensor::Device;
use firebrick_backends::device::is_cpu;
use firebrick_backends::{Precision, PrecisionExt};
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::{LossScale, OptimConfig};
use firebrick_engine::plan::{MemoryConfig, ModelPlan, MomentKind, OptimizerOffload, ParamOffload};
use firebrick_engine::sequence::Sequence;
use firebrick_models::random::DrawKey;
use firebrick_models::{Decoder, Prepack, Quantization};
use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
use std::path::Path;
use std::sync::Arc;

on_devices! {
    log_probs_are_those_of_f32_to_the_precision_s_digits,
    gradients_are_those_of_f32_to_the_precision_s_digits_under_every_kind_of_plan,
    updates_too_small_for_a_weight_add_up_in_its_master_wherever_that_lives,
    a_loss_scale_changes_no_update_and_halves_where_gradients_overflow,
    what_is_sampled_has_the_log_probs_of_a_whole_forward,
    a_precision_that_the_device_does_not_compute_in_is_refused_with_those_it_does,
}

/// Roundings that a gradient gathers on its way: `PyTorch`'s own are 13 of them from f32's on the model at hand (bf16:
/// 0.10, f16: 0.015 relative L2), and ours add up in another order.
const GRADIENTS: f64 = 25.0;

/// Half precisions of a device, and about how far apart neighbouring numbers of each are.
fn halves(device: &Device) -> Vec<(Precision, f64)> {
    let halves = Precision::ALL.into_iter().filter(|p| p.is_half());
    let known = halves.filter(|precision| precision.check(device).is_ok());
    known.map(|p| (p, spacing(p))).collect()
}

/// A model with gradients among the golden numbers.
fn tied(precision: Precision, device: &Device) -> (Model, Golden) {
    model_in(precision, &fixtures().join("models/qwen2-tied"), device)
}

/// Relative L2 distance.
fn apart(found: &[f64], expected: &[f64]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-12)
}

fn log_probs_are_those_of_f32_to_the_precision_s_digits(device: &Device) {
    let mut rows = 0;
    for (precision, spacing) in halves(device) {
        // a GPU compiles kernels for every shape that it meets: one model there
        let most = if is_cpu(device) { usize::MAX } else { 1 };
        for dir in folders("models").into_iter().take(most) {
            let (model, golden) = model_in(precision, &dir, device);
            let sequences = rows_of_one_network(&dir, &golden);
            let scores = model.score(&model.plain(1024), 1.0, &sequences);
            let expected = golden.float_rows("logprobs_right");
            for (sequence, (found, expected)) in sequences.iter().zip(scores.logp.iter().zip(&expected)) {
                let n = sequence.tokens.len() - 1;
                let found: Vec<f64> = found[..n].iter().map(|&x| f64::from(x)).collect();
                let distance = apart(&found, &expected[..n]);
                let label = format!("{} in {precision}: {distance:e}", model.name);
                // a recurrence carries rounding along, here as in f32
                let most = 2.0 * spacing * model.tolerance() / F32_ELSEWHERE;
                assert!(distance < most, "{label}");
                assert!(distance > 0.0, "{label}: computed in f32");
                rows += 1;
            }
        }
    }
    if !halves(device).is_empty() {
        checked("rows of log-probs in half precision", rows);
    }
}

/// The golden rows. Where there are experts they go the way that they go in f32: in half precision a router may take
/// others where two are nearly as likely, as transformers' does too, and another network has other log-probs.
fn rows_of_one_network(dir: &Path, golden: &Golden) -> Vec<Sequence> {
    let mut rows = scored_rows(golden);
    let wide = Model::load(dir);
    if wide.decoder.arch().route_width() > 0 {
        let scores = wide.score(&wide.plain(1024), 1.0, &rows);
        for (row, routes) in rows.iter_mut().zip(scores.routes) {
            row.routes = routes.map(Arc::new);
        }
    }
    rows
}

/// Settings that keep, move and cut differently.
fn plans(model: &Model) -> Vec<(&'static str, ModelPlan)> {
    let settings: [Technique; 4] = [
        ("plain", |_| {}),
        ("recomputed", |m| m.gradient_checkpointing = true),
        ("small pieces", |m| {
            m.head_rows = 3;
            m.attention_rows = 4;
        }),
        ("all on the host", |m| {
            m.gradient_checkpointing = true;
            m.activation_offload = true;
            m.grad_offload = true;
            m.param_offload = ParamOffload::Streamed;
        }),
    ];
    let plan = |(name, set): Technique| {
        let mut memory = MemoryConfig::default();
        set(&mut memory);
        (name, memory.plan(model.decoder.arch()).unwrap())
    };
    settings.into_iter().map(plan).collect()
}

fn gradients_are_those_of_f32_to_the_precision_s_digits_under_every_kind_of_plan(device: &Device) {
    let mut tensors = 0;
    for (precision, spacing) in halves(device) {
        let (model, golden) = tied(precision, device);
        let rows = nll_rows(&golden);
        let whole: Vec<Vec<&Sequence>> = vec![rows.iter().collect()];
        let expected = model.golden_gradients().expect("gradients of this model");
        for (name, plan) in plans(&model) {
            let (sums, found) = model.backward(&plan, 1.0, &Nll, &whole);
            assert_close(name, sums.loss, model.manifest.loss.unwrap(), 2.0 * spacing);
            for (parameter, found) in &found {
                let distance = apart(found, &expected.floats(parameter));
                assert!(distance < GRADIENTS * spacing, "{precision}, {name}: {parameter} is {distance:e} apart");
                tensors += 1;
            }
        }
    }
    if !halves(device).is_empty() {
        checked("gradient tensors in half precision", tensors);
    }
}

/// All of some rows on the CPU, and the first on GPUs, where drivers in software take minutes for all.
fn few(device: &Device, mut rows: Vec<Sequence>) -> Vec<Sequence> {
    rows.truncate(if is_cpu(device) { rows.len() } else { 1 });
    rows
}

/// Weights after some steps on the golden rows.
fn trained(
    start: &Decoder,
    memory: &MemoryConfig,
    optim: &OptimConfig,
    rows: &[Sequence],
    steps: usize,
) -> Vec<Vec<f64>> {
    let mut learner = learner(start, memory, optim);
    for _ in 0..steps {
        learner.update(rows, 1.0, &Nll, optim.lr).unwrap();
    }
    let values = learner.decoder().params();
    values.map(|(_, p)| p.download().unwrap().to_f64()).collect()
}

fn learner(start: &Decoder, memory: &MemoryConfig, optim: &OptimConfig) -> Learner {
    let plan = memory.plan(start.arch()).unwrap();
    let runtime = Runtime::new(start.device()).with_prefetch(plan.prefetch);
    let mut learner = Learner::new(start.clone(), plan, optim.clone(), runtime);
    learner.model.set_residency(Residency::Pass).unwrap();
    learner
}

fn updates_too_small_for_a_weight_add_up_in_its_master_wherever_that_lives(device: &Device) {
    const STEPS: usize = 24;
    let homes: [Technique; 5] = [
        ("device", |_| {}),
        ("device, idle on the host", |m| {
            m.optimizer_offload = OptimizerOffload::Idle;
        }),
        ("host", |m| m.optimizer_offload = OptimizerOffload::Cpu),
        ("host, weights too", |m| {
            m.optimizer_offload = OptimizerOffload::Cpu;
            m.gradient_checkpointing = true;
            m.param_offload = ParamOffload::Streamed;
        }),
        ("device, moments in 8 bits", |m| {
            m.moments = MomentKind::Block8;
        }),
    ];
    let optim = OptimConfig { lr: 2e-5, weight_decay: 0.0, ..OptimConfig::default() };
    for (precision, spacing) in halves(device) {
        let (model, golden) = tied(precision, device);
        let rows = few(device, nll_rows(&golden));
        let start = trained(&model.decoder, &MemoryConfig::default(), &optim, &rows, 0);
        let exact = {
            let (wide, _) = tied(Precision::F32, device);
            trained(&wide.decoder, &MemoryConfig::default(), &optim, &rows, STEPS)
        };
        for (name, set) in homes {
            let mut memory = MemoryConfig::default();
            set(&mut memory);
            let after = trained(&model.decoder, &memory, &optim, &rows, STEPS);
            let (mut moved, mut all, mut wrong) = (0, 0, 0);
            for ((before, after), exact) in start.iter().zip(&after).zip(&exact) {
                for ((before, after), exact) in before.iter().zip(after).zip(exact) {
                    // one step moves a weight by the rate, which is below half of what tells these apart
                    let large = before.abs() * spacing > 4.0 * optim.lr && before.abs() < 0.1;
                    if large {
                        all += 1;
                        moved += usize::from((before - after).abs() > 0.0);
                        let far = spacing * before.abs() + 0.5 * STEPS as f64 * optim.lr;
                        wrong += usize::from((after - exact).abs() > far);
                    }
                }
            }
            let label = format!("{precision}, {name}: {moved} moved of {all}, {wrong} elsewhere");
            assert!(all > 500 && moved * 4 > all && wrong * 50 < all, "{label}");
        }
    }
}

fn a_loss_scale_changes_no_update_and_halves_where_gradients_overflow(device: &Device) {
    let (model, golden) = tied(Precision::F32, device);
    let rows = few(device, nll_rows(&golden));
    let memory = MemoryConfig::default();
    let optim = |scale| OptimConfig { lr: 1e-3, loss_scale: scale, ..OptimConfig::default() };
    let plain = trained(&model.decoder, &memory, &optim(None), &rows, 2);
    let scaled = optim(Some(LossScale::Fixed(4096.0)));
    let scaled = trained(&model.decoder, &memory, &scaled, &rows, 2);
    let names = model.decoder.params().map(|(spec, _)| spec.name.clone());
    for (name, (plain, scaled)) in names.zip(plain.iter().zip(&scaled)) {
        // softmax does not see what all keys have in common: the gradient is rounding alone, which on wgpu differs from
        // run to run, and AdamW makes whole steps of it
        if !name.ends_with("k_proj.bias") {
            assert!(apart(scaled, plain) < 1e-5, "{name}");
        }
    }
    let Some((f16, _)) = halves(device).into_iter().find(|(p, _)| *p == Precision::F16) else {
        return;
    };
    // a loss so large that its gradients pass f16's largest number until the scale has come down
    let (model, _) = tied(f16, device);
    let mut loud = rows.clone();
    for row in &mut loud {
        let weights = row.columns.weight.iter_mut().flatten();
        weights.for_each(|w| *w *= 2e3);
    }
    let optim = optim(None);
    let mut learner = learner(&model.decoder, &memory, &optim);
    let mut scales = Vec::new();
    let applied = loop {
        let updated = learner.update(&loud, 1.0, &Nll, optim.lr).unwrap();
        scales.push(updated.outcome.loss_scale.expect("f16 scales its loss"));
        if updated.outcome.applied {
            break updated;
        }
        assert!(updated.outcome.rescaled && learner.optimizer.steps() == 0);
        assert!(scales.len() < 17, "{scales:?}");
    };
    assert!(scales.len() > 1, "nothing overflowed");
    assert!(scales.windows(2).all(|w| (w[0] - 2.0 * w[1]).abs() < 1e-9), "{scales:?}");
    assert!(applied.outcome.grad_norm.is_finite() && learner.optimizer.steps() == 1);
}

fn what_is_sampled_has_the_log_probs_of_a_whole_forward(device: &Device) {
    for (precision, spacing) in halves(device) {
        let (mut model, golden) = tied(precision, device);
        let prompts: Vec<Vec<u32>> = scored_rows(&golden).into_iter().map(|row| row.tokens[..3].to_vec()).collect();
        let trained = model.decoder.clone();
        let plain = Prepack::default();
        let exact = hold_sampled(&trained, plain, &model, &prompts, 8.0 * spacing);
        // the CPU's kernels widen 8 bits to f32
        if !is_cpu(device) {
            // in which codes times scales are rounded once more, to half precision
            model.decoder = in_8_bits(&trained);
            let prepack = Prepack { quantization: Some(Quantization::Int8), ..Prepack::default() };
            let rounded = hold_sampled(&trained, prepack, &model, &prompts, 16.0 * spacing);
            assert_ne!(exact, rounded, "{precision}: weights are read in 8 bits");
        }
    }
}

/// Samples from a decoder, and gives its log-probs; a model's forward has the same.
fn hold_sampled(decoder: &Decoder, prepack: Prepack, model: &Model, prompts: &[Vec<u32>], tolerance: f64) -> Vec<f32> {
    let request = |(i, tokens): (usize, &Vec<u32>)| GenerationRequest {
        tokens: tokens.clone(),
        key: DrawKey { seed: 5, step: 0, prompt_index: i as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = prompts.iter().enumerate().map(request).collect();
    let sampling = SamplingParams { max_new_tokens: 6, ..SamplingParams::default() };
    let generator = Generator::new(decoder, None, &sampling).unwrap();
    let samples = generator.prepack(prepack).run(&requests, 1, 4).unwrap();
    let whole: Vec<Sequence> =
        prompts.iter().zip(&samples).map(|(prompt, sample)| Sequence::completion(prompt, &sample.tokens)).collect();
    let scores = model.score(&model.plain(64), 1.0, &whole);
    for (sample, scored) in samples.iter().zip(&scores.logp) {
        for (sampled, scored) in sample.logps.iter().zip(scored) {
            let apart = f64::from((sampled - scored).abs());
            assert!(apart < tolerance, "{prepack:?}: {sampled} and {scored}");
        }
    }
    samples.iter().flat_map(|s| s.logps.clone()).collect()
}

fn a_precision_that_the_device_does_not_compute_in_is_refused_with_those_it_does(device: &Device) {
    for precision in Precision::ALL {
        let Err(error) = precision.check(device) else {
            continue;
        };
        let message = error.to_string();
        assert!(message.contains(precision.name()), "{message}");
        assert!(message.contains("f32") && message.contains("firebrick devices"), "{message}");
    }
    assert!(Precision::F32.check(device).is_ok());
}
