//! Every memory technique: the same loss and gradients as the plain plan, and the same weights after an update.

use std::collections::BTreeMap;

use super::{model, on_devices};
use burn::tensor::Device;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::device::is_cpu;
use firebrick_backends::{Precision, PrecisionExt};
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, MomentKind, OptimizerOffload, ParamOffload};
use firebrick_engine::sequence::Sequence;

use crate::support::model::{Model, nll_rows};
use crate::support::techniques::{MOMENTS, Technique, optimizers, passes};
use crate::support::tolerance::{COARSE_MOMENTS, F32, F32_UPDATE};
use crate::support::{assert_close, assert_gradient, checked, fixtures, folders, is_campaign};

on_devices! {
    every_plan_gives_the_loss_and_gradients_of_the_plain_one,
    every_place_of_the_optimizer_gives_the_weights_of_the_plain_one,
    sums_in_any_order_give_the_weights_of_those_in_one_order,
    every_technique_takes_bytes_from_the_account_that_it_is_about,
}

fn rows(model: &Model) -> Vec<Sequence> {
    nll_rows(&model.golden("forward.safetensors"))
}

/// One micro-batch a sequence, where a sequence's scores do not depend on the others.
fn cut<'r>(model: &Model, rows: &'r [Sequence]) -> Vec<Vec<&'r Sequence>> {
    if model.manifest.is_local() { rows.iter().map(|row| vec![row]).collect() } else { vec![rows.iter().collect()] }
}

/// Loss and gradients of a model under plans of the table, against the plain plan; how many were compared.
fn compare_passes(model: &Model, table: &[(String, MemoryConfig)]) -> usize {
    let rows = rows(model);
    let micros = cut(model, &rows);
    let expected = model.backward(&model.plain(1024), 1.0, &Nll, &micros);
    for (name, memory) in table {
        let label = format!("{}, {name}", model.name);
        let plan = memory.plan(model.decoder.arch()).expect("a plan");
        let (sums, found) = model.backward(&plan, 1.0, &Nll, &micros);
        assert_close(&label, sums.loss, expected.0.loss, F32);
        assert!(found.keys().eq(expected.1.keys()), "{label}: other parameters");
        for (parameter, found) in &found {
            let label = format!("{label}: {parameter}");
            assert_gradient(&label, found, &expected.1[parameter], F32);
        }
    }
    table.len()
}

/// Weights after two updates under a plan, by name, as their change from the start.
fn changes(model: &Model, memory: &MemoryConfig) -> BTreeMap<String, Vec<f64>> {
    changes_on(model, memory, Runtime::new(model.decoder.device()))
}

fn changes_on(model: &Model, memory: &MemoryConfig, runtime: Runtime) -> BTreeMap<String, Vec<f64>> {
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = runtime.with_prefetch(plan.prefetch);
    let optim = OptimConfig {
        clip_grad: None,
        weight_decay: 0.0,
        // far above the noise of a gradient that is zero but for rounding, whose direction nothing decides
        eps: 1e-3,
        ..OptimConfig::default()
    };
    let mut learner = Learner::new(model.decoder.clone(), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    for _ in 0..2 {
        let updated = learner.update(&rows(model), 1.0, &Nll, 1e-2).expect("an update");
        assert!(updated.outcome.applied && updated.outcome.grad_norm > 0.0);
    }
    let before = model.decoder.params();
    let pairs = before.zip(learner.decoder().params());
    pairs
        .map(|((spec, before), (_, after))| {
            let values = |p: firebrick_models::decoder::Param| p.download().expect("values").to_f64();
            let change = values(after).iter().zip(values(before)).map(|(a, b)| a - b).collect();
            (spec.name.clone(), change)
        })
        .collect()
}

/// Updates under plans of the table, against the plain plan; how many were compared.
fn compare_updates(model: &Model, table: &[(String, MemoryConfig)]) -> usize {
    let expected = changes(model, &MemoryConfig::default());
    for (name, memory) in table {
        for (parameter, found) in &changes(model, memory) {
            let label = format!("{}, {name}: change of {parameter}", model.name);
            assert_gradient(&label, found, &expected[parameter], F32_UPDATE);
        }
    }
    table.len()
}

/// The device computes with what is stored in fewer bits: close to the plain update, not equal to it.
fn compare_moments(model: &Model, kinds: &[Technique]) -> usize {
    let expected = changes(model, &MemoryConfig::default());
    for (name, turn_on) in kinds {
        let mut memory = MemoryConfig::default();
        turn_on(&mut memory);
        for (parameter, found) in &changes(model, &memory) {
            let label = format!("{}, {name}: change of {parameter}", model.name);
            assert_gradient(&label, found, &expected[parameter], COARSE_MOMENTS);
        }
    }
    kinds.len()
}

fn every_plan_gives_the_loss_and_gradients_of_the_plain_one(device: &Device) {
    let table = passes();
    let dirs = folders("models").into_iter();
    let models = dirs.map(|dir| model(&dir, device).0);
    // a GPU compiles kernels for every shape that it meets: one model there
    let most = if is_cpu(device) { usize::MAX } else { 1 };
    let models = models.filter(|m| m.golden_gradients().is_some()).take(most);
    // on the CPU each model takes a fourth of the plans, the next model the next fourth; `exact` takes all in f64, and
    // so does the nightly test
    let parts = if is_cpu(device) && !is_campaign("techniques") { 4 } else { 1 };
    let part = |at: usize| table.iter().skip(at % parts).step_by(parts).cloned().collect::<Vec<_>>();
    let cases = models.enumerate().map(|(at, model)| compare_passes(&model, &part(at))).sum();
    checked("plans against the plain one", cases);
}

fn every_place_of_the_optimizer_gives_the_weights_of_the_plain_one(device: &Device) {
    let (model, _) = model(&fixtures().join("models/llama-gqa"), device);
    let every = if is_cpu(device) { 1 } else { 3 };
    let places: Vec<_> = optimizers().into_iter().step_by(every).collect();
    // where the device stores no bf16 that kind is refused
    let kinds = usize::from(Precision::Bf16.check(device).is_err());
    let cases = compare_updates(&model, &places) + compare_moments(&model, &MOMENTS[kinds..]);
    checked("places and kinds of moments", cases);
}

fn sums_in_any_order_give_the_weights_of_those_in_one_order(device: &Device) {
    let (model, _) = model(&fixtures().join("models/llama-gqa"), device);
    let memory = MemoryConfig::default();
    let expected = changes(&model, &memory);
    let runtime = Runtime::new(device).with_determinism(false);
    let found = changes_on(&model, &memory, runtime);
    for (parameter, found) in &found {
        assert_gradient(parameter, found, &expected[parameter], F32_UPDATE);
    }
    checked("parameters", found.len());
}

/// Techniques on top of recomputing, and what each holds less of on the device.
const SAVINGS: [(Technique, Category); 7] = [
    (("inputs on the host", |m| m.activation_offload = true), Category::KeptInputs),
    (
        ("weights streamed", |m| {
            m.param_offload = ParamOffload::Streamed;
        }),
        Category::Parameters,
    ),
    (("gradients on the host", |m| m.grad_offload = true), Category::Gradients),
    (
        ("updated in the backward pass", |m| {
            m.step_in_backward = true;
        }),
        Category::Gradients,
    ),
    (
        ("state away between updates", |m| {
            m.optimizer_offload = OptimizerOffload::Idle;
        }),
        Category::Moments,
    ),
    (
        ("updated on the host", |m| {
            m.optimizer_offload = OptimizerOffload::Cpu;
        }),
        Category::Moments,
    ),
    (("8-bit moments", |m| m.moments = MomentKind::Block8), Category::Moments),
];

/// Most bytes that an account of the device has during a second update, when all state exists.
fn most_held(model: &Model, memory: &MemoryConfig, category: Category) -> u64 {
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(model.decoder.device()).with_prefetch(plan.prefetch);
    let optim = OptimConfig { clip_grad: None, ..OptimConfig::default() };
    let mut learner = Learner::new(model.decoder.clone(), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    for _ in 0..2 {
        learner.runtime.accounts.reset_peaks();
        learner.update(&rows(model), 1.0, &Nll, 1e-4).expect("an update");
    }
    let account = learner.runtime.accounts.balance(category, Home::Device);
    account.peak_bytes
}

fn every_technique_takes_bytes_from_the_account_that_it_is_about(device: &Device) {
    let (model, _) = model(&fixtures().join("models/llama-gqa"), device);
    // copies in place: none is on its way while another is
    let without = MemoryConfig { gradient_checkpointing: true, prefetch: 0, ..MemoryConfig::default() };
    for ((name, turn_on), category) in SAVINGS {
        let mut with = without.clone();
        turn_on(&mut with);
        let less = most_held(&model, &with, category);
        let more = most_held(&model, &without, category);
        assert!(less < more, "{name}: {less} instead of {more} bytes");
    }
    checked("techniques and their accounts", SAVINGS.len());
}
