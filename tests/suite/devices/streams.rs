//! Copies beside kernels on CUDA: what the stand-in for a card (`tests/cuda`) records of an offloaded step, and what
//! the step gives when streams run as early or as late as their events allow.

use super::model_in;
use super::own_process::{self, is_inner};
use super::stand_in::{EARLY, RECORD, is_stand_in};
use crate::support::model::nll_rows;
use crate::support::tolerance::F32_UPDATE;
use crate::support::{assert_gradient, checked, fixtures, report};
use burn::tensor::Device;
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Category, Home};
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::{MemoryConfig, OptimizerOffload, ParamOffload};
use firebrick_engine::sequence::Sequence;
use firebrick_models::decoder::Store;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::read_to_string;

/// Bytes of the copies that only order two streams.
const MARK: u64 = 4;

mod cuda {
    use crate::devices::gpu;

    #[test]
    fn copies_of_an_offloaded_step_run_beside_kernels_and_move_what_the_plan_says() {
        if let Some((device, _alone)) = gpu("cuda") {
            super::recorded(&device);
        }
    }

    #[test]
    fn what_an_update_keeps_on_the_host_lies_in_pinned_memory() {
        if let Some((device, _alone)) = gpu("cuda") {
            super::pinned(&device);
        }
    }

    #[test]
    fn whatever_order_events_allow_an_offloaded_step_gives_the_weights_of_the_plain_one() {
        if let Some((device, _alone)) = gpu("cuda") {
            super::ordered(&device);
        }
    }
}

/// Runs one test of this file in a process of its own, with these settings of the stand-in.
fn again(test: &str, settings: &[(&str, &str)]) {
    own_process::again(&format!("devices::streams::cuda::{test}"), settings);
}

/// Streamed weights and inputs on the host.
fn offloaded() -> MemoryConfig {
    MemoryConfig {
        gradient_checkpointing: true,
        activation_offload: true,
        param_offload: ParamOffload::Streamed,
        ..MemoryConfig::default()
    }
}

fn learner(memory: &MemoryConfig, device: &Device) -> (Learner, Vec<Sequence>) {
    learner_in(Precision::F32, memory, device)
}

fn learner_in(precision: Precision, memory: &MemoryConfig, device: &Device) -> (Learner, Vec<Sequence>) {
    let (model, golden) = model_in(precision, &fixtures().join("models/llama-gqa"), device);
    let plan = memory.plan(model.decoder.arch()).expect("a plan");
    let runtime = Runtime::new(device).with_prefetch(plan.prefetch);
    let optim = OptimConfig { clip_grad: None, weight_decay: 0.0, eps: 1e-3, ..OptimConfig::default() };
    let mut learner = Learner::new(model.decoder, plan, optim, runtime);
    let placed = learner.model.set_residency(Residency::Pass);
    placed.expect("weights in their place");
    (learner, nll_rows(&golden))
}

/// A line of the record, as words.
type Call = Vec<String>;

/// The calls of a record that come after so many.
fn calls_after(before: usize, path: &str) -> Vec<Call> {
    let text = read_to_string(path).expect("a record");
    let words = |line: &str| -> Call { line.split(' ').map(str::to_owned).collect() };
    text.lines().skip(before).map(words).collect()
}

/// Calls of a second update; bytes up and down that its plan asks for, and those up that come before any kernel could
/// run beside them: the embedding of the first visit, the kept input that comes back first.
fn second_update(device: &Device, path: &str) -> (Vec<Call>, [u64; 3]) {
    let (mut learner, rows) = learner(&offloaded(), device);
    learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
    learner.runtime.accounts.reset_peaks();
    let mut weights = 0;
    let last = learner.decoder().units().len() - 1;
    for (index, unit) in learner.decoder().units().iter().enumerate() {
        if let Store::Host(host) = &unit.store {
            let shared = host.iter().all(|(_, value)| value.is_shared());
            assert!(shared, "unit {index} is copied on the host first");
            // both ends are visited once, segments in both directions
            let visits = if index == 0 || index == last { 1 } else { 2 };
            weights += visits * unit.store.bytes() as u64;
        }
    }
    assert!(weights > 0);
    device.sync().expect("a first update");
    let before = read_to_string(path).expect("a record").lines().count();
    let updating = learner.accumulate(&rows, 1.0, &Nll, 1e-2);
    let _ = updating.expect("a second update's passes");
    device.sync().expect("a second update's passes");
    let calls = calls_after(before, path);
    let accounts = &learner.runtime.accounts;
    let kept = accounts.balance(Category::KeptInputs, Home::Host);
    let kept = kept.peak_bytes;
    let segments = learner.model.plan.segments.len() as u64;
    let embedding = &learner.decoder().units()[0].store;
    let first = match embedding {
        Store::Host(_) => embedding.bytes() as u64,
        Store::Device(_) => 0,
    };
    (calls, [weights + kept, kept, kept / segments + first])
}

/// Copies of one direction on streams without kernels: place in the record, bytes, stream, memory of the host.
fn copies<'c>(calls: &'c [Call], direction: &str, computing: &str) -> Vec<(usize, u64, &'c str, &'c str)> {
    let all = calls.iter().enumerate().filter(|(_, c)| c[0] == direction);
    all.map(|(at, c)| (at, c[1].parse().expect("bytes"), &*c[2], &*c[3]))
        .filter(|(_, bytes, stream, _)| *bytes > MARK && *stream != computing)
        .collect()
}

/// Kernels that were asked for in a part of the record.
fn kernels(calls: &[Call]) -> usize {
    calls.iter().filter(|c| c[0] == "kernel").count()
}

/// Kernels that a copy to the device may run beside: those asked for between the event that it waits for and the wait
/// for it.
fn beside(calls: &[Call], at: usize, stream: &str, computing: &str) -> usize {
    let waits = |c: &Call, later: &str, of: &str| c[0] == "wait" && c[2] == later && c[3] == of;
    let after = calls[..at].iter().rposition(|c| waits(c, stream, computing));
    let event = &calls[after.expect("memory that others used is waited for")][1];
    let is_recorded = |c: &Call| c[0] == "record" && c[1] == *event;
    let from = calls.iter().rposition(is_recorded).expect("an event");
    let until = calls[at..].iter().position(|c| waits(c, computing, stream)).expect("what is copied is waited for");
    kernels(&calls[from..at + until])
}

fn recorded(device: &Device) {
    if !is_stand_in() {
        return;
    }
    if !is_inner() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        let path = path.to_str().expect("a path in UTF-8");
        let test = "copies_of_an_offloaded_step_run_beside_kernels_and_move_what_the_plan_says";
        again(test, &[(RECORD, path)]);
        return;
    }
    let path = std::env::var(RECORD).expect("the outer test sets it");
    let (calls, [up, down, first]) = second_update(device, &path);
    let launched = calls.iter().filter(|c| c[0] == "kernel");
    let streams: BTreeSet<&str> = launched.map(|c| &*c[2]).collect();
    let computing = *streams.first().expect("kernels");
    assert_eq!(streams.len(), 1, "kernels have one stream");

    let ups = copies(&calls, "up", computing);
    let downs = copies(&calls, "down", computing);
    let bytes = |copies: &[Copied<'_>]| copies.iter().map(|c| c.1).sum::<u64>();
    assert_eq!([bytes(&ups), bytes(&downs)], [up, down], "as planned");
    for (_, _, _, memory) in ups.iter().chain(&downs) {
        assert_eq!(*memory, "pinned");
    }
    let alone = ups.iter().filter(|(at, _, stream, _)| beside(&calls, *at, stream, computing) == 0);
    let alone: u64 = alone.map(|c| c.1).sum();
    assert!(alone <= first, "{alone} of {up} bytes up have no kernel beside them, and not {first}");
    let returned: BTreeSet<&str> = downs.iter().map(|c| c.2).collect();
    let held_up = |c: &&Call| c[0] == "wait" && c[2] == computing && returned.contains(&*c[3]);
    let held_up = calls.iter().filter(held_up).count();
    assert_eq!(held_up, 0, "no kernel waits for a copy to the host");
    let ends = downs.iter().skip(1).map(|c| c.0);
    for ((from, ..), until) in downs.iter().zip(ends.chain([calls.len()])) {
        assert!(kernels(&calls[*from..until]) > 0, "the copy at {from}");
    }
    report(&table(&calls, computing, &[("up", &ups), ("down", &downs)]));
    checked("copies beside kernels", ups.len() + downs.len());
}

/// In half precision, with weights, masters, moments and gradients on the host: of a whole update no matrix is copied
/// from ordinary memory, or to it.
fn pinned(device: &Device) {
    if !is_stand_in() {
        return;
    }
    if !is_inner() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("record");
        let path = path.to_str().expect("a path in UTF-8");
        again("what_an_update_keeps_on_the_host_lies_in_pinned_memory", &[(RECORD, path)]);
        return;
    }
    let path = std::env::var(RECORD).expect("the outer test sets it");
    let memory = MemoryConfig {
        grad_offload: true,
        optimizer_offload: OptimizerOffload::Idle,
        // a gradient on the host is made and added to
        micro_batch_size: Some(1),
        ..offloaded()
    };
    let (mut learner, rows) = learner_in(Precision::Bf16, &memory, device);
    assert!(rows.len() > 1);
    learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
    device.sync().expect("a first update");
    let before = read_to_string(&path).expect("a record").lines().count();
    learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
    device.sync().expect("a second update");
    let calls = calls_after(before, &path);
    let matrices = learner.decoder().params();
    let smallest = matrices.filter(|(spec, _)| !spec.slot.is_norm_or_bias());
    let smallest = smallest.map(|(spec, _)| spec.numel() * 2);
    let smallest = smallest.min().expect("matrices") as u64;
    for direction in ["up", "down"] {
        let copies = copies(&calls, direction, "");
        let large: Vec<_> = copies.iter().filter(|c| c.1 >= smallest).collect();
        let pageable = large.iter().filter(|c| c.3 != "pinned").count();
        assert!(large.len() > 10, "{direction}: {} copies", large.len());
        assert_eq!(pageable, 0, "{direction}: of {} copies", large.len());
        checked(&format!("copies {direction} of pinned memory"), large.len());
    }
}

/// A copy: its place among the calls, its bytes, its stream, and the memory on the host's side.
type Copied<'c> = (usize, u64, &'c str, &'c str);

/// The rows of BENCHMARKS.md.
fn table(calls: &[Call], computing: &str, directions: &[(&str, &[Copied<'_>])]) -> String {
    let mut text = String::from("| direction | copies | bytes | stream | kernels beside them |\n");
    for (direction, copies) in directions {
        let bytes: u64 = copies.iter().map(|c| c.1).sum();
        let overlapped = copies.iter().map(|&(at, _, stream, _)| match *direction {
            "up" => beside(calls, at, stream, computing),
            _ => kernels(&calls[at..]),
        });
        let most = overlapped.clone().max().unwrap_or(0);
        let least = overlapped.min().unwrap_or(0);
        let stream = copies.first().map_or("-", |c| c.2);
        let count = copies.len();
        let row = writeln!(text, "| {direction} | {count} | {bytes} | {stream} | {least} to {most} |");
        row.expect("a string takes it");
    }
    let last = write!(text, "kernels: {}, stream {computing}", kernels(calls));
    last.expect("a string takes it");
    text
}

fn weights(learner: &Learner) -> Vec<(String, Vec<f64>)> {
    let params = learner.decoder().params();
    params
        .map(|(spec, value)| {
            let value = value.download().expect("values");
            (spec.name.clone(), value.to_f64())
        })
        .collect()
}

/// What two updates add to weights.
fn updated(memory: &MemoryConfig, device: &Device) -> Vec<(String, Vec<f64>)> {
    let (mut learner, rows) = learner(memory, device);
    let before = weights(&learner);
    for _ in 0..2 {
        learner.update(&rows, 1.0, &Nll, 1e-2).expect("an update");
    }
    let mut after = weights(&learner);
    for ((_, after), (_, before)) in after.iter_mut().zip(before) {
        for (value, old) in after.iter_mut().zip(before) {
            *value -= old;
        }
    }
    after
}

fn ordered(device: &Device) {
    if !is_stand_in() {
        return;
    }
    if !is_inner() {
        let test = "whatever_order_events_allow_an_offloaded_step_gives_the_weights_of_the_plain_one";
        again(test, &[]);
        again(test, &[(EARLY, "kernels")]);
        again(test, &[(EARLY, "copies")]);
        return;
    }
    let plain = updated(&MemoryConfig::default(), device);
    let found = updated(&offloaded(), device);
    let everything_away = MemoryConfig { grad_offload: true, prefetch: 2, ..offloaded() };
    let away = updated(&everything_away, device);
    for ((name, expected), others) in plain.iter().zip(found.iter().zip(&away)) {
        assert_gradient(name, &others.0.1, expected, F32_UPDATE);
        assert_gradient(name, &others.1.1, expected, F32_UPDATE);
    }
    checked("parameters after an offloaded step", plain.len());
}
