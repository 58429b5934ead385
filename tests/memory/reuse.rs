//! Host memory of updates that copy to it: had once, and then used again.
#![cfg(target_os = "linux")]

use crate::own_process::in_own_process;
use firebrick::backends::allocator;
use firebrick::backends::device::{DeviceSpec, open};
use firebrick::engine::batch::Batch;
use firebrick::engine::executor::{Executor, Gradients, Residency, ResidentModel, Runtime};
use firebrick::engine::learner::{Learner, train_cut};
use firebrick::engine::objective::sft::Nll;
use firebrick::engine::optim::OptimConfig;
use firebrick::engine::plan::MemoryConfig;
use firebrick::engine::sequence::Sequence;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

in_own_process!(a_warm_update_with_offload_takes_its_host_buffers_from_memory_that_it_has);

/// Updates after which everything that repeats has been allocated, and those that count.
const WARM: usize = 4;
const COUNTED: usize = 6;

/// Sequences of an update, and their tokens.
const SEQUENCES: usize = 4;
const LENGTH: u32 = 256;

/// Bytes of the smallest page.
const PAGE: u64 = 4096;

/// Pages that were not in memory when they were touched, of this process so far: `minflt` of proc(5).
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux tells");
    // the name of the program, in parentheses, may hold spaces
    let after = stat.rsplit(')').next().expect("a name");
    let field = after.split_whitespace().nth(7).expect("a tenth field");
    field.parse().expect("a number")
}

/// Bytes that the process has in memory: `VmRSS` of proc(5).
pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok()).expect("a number") * 1024
}

/// What half of the updates stay below.
fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

/// A model of 11 million parameters, everything of it that can be on the host there.
fn learner() -> Learner {
    let Value::Object(config) = json!({
        "model_type": "llama", "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 704,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2
    }) else {
        unreachable!("an object")
    };
    let arch = Arch::from_config(&config, Path::new("reuse")).expect("a valid architecture");
    let memory: MemoryConfig = serde_json::from_value(json!({
        "gradient_checkpointing": true, "head_rows": 64, "activation_offload": true, "grad_offload": true,
        "optimizer_offload": "cpu", "param_offload": "streamed", "micro_batch_size": 1
    }))
    .expect("settings of the memory section");
    let plan = memory.plans(&arch, false, None, SEQUENCES).expect("a plan");
    let (device, _) = open(DeviceSpec::CPU).expect("the CPU is always there");
    let prefetch = plan.policy().prefetch;
    let runtime = Arc::new(Runtime::new(&device).with_prefetch(prefetch));
    let decoder = Decoder::random(arch, 1, &device);
    let plan = plan.policy().clone();
    let mut learner = Learner::new(decoder, plan, OptimConfig::default(), runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in place");
    learner
}

fn update(learner: &mut Learner) {
    let sequences: Vec<Sequence> = (0..SEQUENCES as u32)
        .map(|salt| {
            let tokens: Vec<u32> = (0..LENGTH).map(|i| (i * 7919 + salt * 104_729) % 8192).collect();
            let mut sequence = Sequence::completion(&tokens[..1], &tokens[1..]);
            sequence.columns.weight = Some(vec![1e-3; tokens.len() - 1]);
            sequence
        })
        .collect();
    let Learner { model, optimizer, runtime, .. } = learner;
    let ResidentModel { decoder, plan, .. } = model;
    let mut gradients = Gradients::planned(decoder.specs().count(), plan, runtime);
    let batch = Batch::pack(&sequences, train_cut(plan, decoder)).expect("micro-batches");
    Executor::new(plan, runtime, 1.0)
        .backward(decoder, &batch.micros(), &Nll, &mut gradients, None)
        .expect("a backward pass");
    let outcome = optimizer.step(decoder, gradients, 1e-6, runtime);
    assert!(outcome.expect("an update").applied);
}

fn a_warm_update_with_offload_takes_its_host_buffers_from_memory_that_it_has() {
    allocator::keep_freed_memory();
    let mut learner = learner();
    for _ in 0..WARM {
        update(&mut learner);
    }
    let started = Instant::now();
    let (mut faulted, mut grown) = (Vec::new(), Vec::new());
    for _ in 0..COUNTED {
        let (before, held) = (faults(), resident());
        update(&mut learner);
        faulted.push((faults() - before) * PAGE);
        grown.push(resident().saturating_sub(held));
    }
    let seconds = started.elapsed().as_secs_f64() / COUNTED as f64;
    // An update that keeps memory keeps it every time, so the least counts: where threads meet in another order, as on
    // a busy machine, one more large page, of 2 MiB, may be touched for the first time. That is one fault.
    let faulted = median(faulted);
    let grew = grown.into_iter().min().expect("counted updates");
    // weights and gradients visit the other side in every update: 2 · 4 bytes a parameter at the least
    let moved = 8 * learner.decoder().num_params() as u64;
    writeln!(
        std::io::stderr(),
        "memory: an update with offload moves {moved} bytes at the least, faults {faulted} in, keeps {grew} more, takes {seconds:.3} s"
    )
    .expect("writing to stderr");
    assert!(faulted < moved / 50, "{faulted} of {moved} bytes faulted in");
    assert!(grew < moved / 50, "{grew} of {moved} bytes kept");
}
