//! Bytes in use on a GPU: predicted, and counted by the backend's pool at segment boundaries.

use burn::tensor::Device;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::device::Backend;
use firebrick_backends::memory::read;
use firebrick_backends::profile::DeviceProfile;
use firebrick_engine::batch::Sequence;
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::placed::Use;
use firebrick_engine::plan::estimate::{Workload, estimate};
use firebrick_engine::plan::{MemoryConfig, Order, ParamOffload};
use firebrick_engine::runtime::Runtime;
use firebrick_models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;

use super::gpu;
use crate::support::checked;
use crate::support::techniques::Technique;

/// How far a prediction may be from what the pool counts.
const TOLERANCE: f64 = 0.15;

const LENGTH: usize = 64;

/// Plans whose worst moment is a boundary: what happens between two of them no reading sees.
const PLANS: [Technique; 6] = [
    ("every layer", |_| {}),
    ("every second layer", |m| m.checkpoint_every = 2),
    ("inputs on the host", |m| m.activation_offload = true),
    ("one sequence a micro-batch", |m| {
        m.micro_batch_size = Some(1);
    }),
    ("weights streamed", |m| {
        m.param_offload = ParamOffload::Streamed;
    }),
    ("weights streamed, segment by segment", |m| {
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.micro_batch_size = Some(1);
    }),
];

fn arch() -> Arch {
    let config = json!({
        "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2
    });
    let Value::Object(config) = config else {
        unreachable!("an object")
    };
    Arch::from_config(&config, Path::new("test")).expect("a valid architecture")
}

fn rows() -> Vec<Sequence> {
    let row = |i: usize| Sequence {
        tokens: (0..LENGTH)
            .map(|t| ((t * 7919 + i * 104_729) % 2048) as u32)
            .collect(),
        positions: (0..LENGTH - 1).collect(),
        weights: vec![1e-3; LENGTH - 1],
        ..Sequence::default()
    };
    (0..4).map(row).collect()
}

/// Bytes in use at the worst moment of a backward pass, what the pool adds left out.
fn predicted(memory: &MemoryConfig) -> u64 {
    let workload = Workload {
        clips: false,
        ..Workload::grpo(arch(), [1, LENGTH as u64 - 1], 4, 1)
    };
    let plan = memory
        .plans(&workload.arch, false, None, 1)
        .expect("a plan");
    let profile = DeviceProfile::assumed(Backend::Wgpu);
    let estimate = estimate(&workload, &plan, &profile);
    let phase = estimate.phase("backward").expect("the phase");
    phase.total_bytes
        - phase
            .categories
            .get(&Category::Overhead)
            .copied()
            .unwrap_or(0)
}

/// Most in use at a boundary of the second update.
fn counted(memory: &MemoryConfig, device: &Device) -> u64 {
    let before = read(device).in_use_bytes;
    let plan = memory.plan(&arch()).expect("a plan");
    let runtime = Runtime::new(device)
        .with_prefetch(plan.prefetch)
        .measuring();
    let optim = OptimConfig {
        clip_grad: None,
        ..OptimConfig::default()
    };
    let mut learner = Learner::new(Decoder::random(arch(), 1, device), plan, optim, runtime);
    learner
        .model
        .settle(Use::Pass)
        .expect("weights in their place");
    let rows = rows();
    for _ in 0..2 {
        let _ = learner.runtime.take_most();
        learner.update(&rows, 1.0, &Nll, 1e-4).expect("an update");
    }
    let parameters = learner
        .runtime
        .accounts
        .balance(Category::Parameters, Home::Device);
    assert!(parameters.peak_bytes > 0);
    learner.runtime.take_most() - before
}

#[test]
fn predictions_are_within_15_percent_of_what_the_pool_counts() {
    let Some((device, _alone)) = gpu("wgpu") else {
        return;
    };
    for (name, turn_on) in PLANS {
        let mut memory = MemoryConfig {
            gradient_checkpointing: true,
            ..MemoryConfig::default()
        };
        turn_on(&mut memory);
        let (predicted, counted) = (predicted(&memory), counted(&memory, &device));
        let apart = predicted as f64 / counted as f64 - 1.0;
        assert!(
            apart.abs() <= TOLERANCE,
            "{name}: {predicted} bytes predicted, {counted} counted, {:+.1} %",
            100.0 * apart
        );
    }
    checked("predictions against wgpu's pool", PLANS.len());
}
