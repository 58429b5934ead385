//! Bytes in use on a GPU: predicted, and counted by the backend's pool at segment boundaries.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::memory::read;
use firebrick_backends::profile;
use firebrick_engine::executor::{Residency, Runtime};
use firebrick_engine::learner::Learner;
use firebrick_engine::objective::sft::Nll;
use firebrick_engine::optim::OptimConfig;
use firebrick_engine::plan::estimate::{EstimatePhase, Workload, estimate};
use firebrick_engine::plan::{MemoryConfig, Order, ParamOffload};
use firebrick_engine::sequence::{Sequence, TokenColumns};
use firebrick_models::unit::Slot;
use firebrick_models::weights::Weights;
use firebrick_models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;

use super::{backend, on_gpus};
use crate::support::techniques::Technique;
use crate::support::{assert_gradient, checked, report, values};

on_gpus!(
    predictions_are_within_15_percent_of_what_the_pool_counts,
    predictions_of_linear_attention_are_within_15_percent_of_what_the_pool_counts,
    the_head_of_a_large_vocabulary_needs_a_twentieth_of_what_whole_logits_need,
    logits_that_are_kept_give_the_gradients_of_recomputed_ones_to_the_bit,
);

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

pub(super) fn arch() -> Arch {
    let config = json!({
        "model_type": "llama", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2
    });
    let Value::Object(config) = config else { unreachable!("an object") };
    Arch::from_config(&config, Path::new("test")).expect("a valid architecture")
}

/// Gated `DeltaNet` in three of four layers, with heads that other tests compile kernels for.
fn linear() -> Arch {
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16
    });
    let Value::Object(config) = config else { unreachable!("an object") };
    Arch::from_config(&config, Path::new("test")).expect("a valid architecture")
}

pub(super) fn rows() -> Vec<Sequence> {
    let row = |i: usize| Sequence {
        tokens: (0..LENGTH).map(|t| ((t * 7919 + i * 104_729) % 2048) as u32).collect(),
        positions: (0..LENGTH - 1).collect(),
        columns: TokenColumns { weight: Some(vec![1e-3; LENGTH - 1]), ..TokenColumns::default() },
        ..Sequence::default()
    };
    (0..4).map(row).collect()
}

/// Bytes in use at the worst moment of a backward pass, what the pool adds left out.
fn predicted(arch: Arch, memory: &MemoryConfig, device: &Device) -> u64 {
    let workload = Workload { clips: false, ..Workload::grpo(arch, [1, LENGTH as u64 - 1], 4, 1) };
    let plan = memory.plans(&workload.arch, false, None, 1).expect("a plan");
    let profile = profile::assumed(backend(device));
    let estimate = estimate(&workload, &plan, &profile);
    let phase = estimate.phase(EstimatePhase::Backward).expect("the phase");
    phase.total_bytes - phase.categories.get(&Category::Overhead).copied().unwrap_or(0)
}

/// Most in use at a boundary of the second update.
fn counted(arch: Arch, memory: &MemoryConfig, device: &Device) -> u64 {
    let before = read(device).in_use_bytes;
    let plan = memory.plan(&arch).expect("a plan");
    let runtime = Runtime::new(device).with_prefetch(plan.prefetch).measuring();
    let optim = OptimConfig { clip_grad: None, ..OptimConfig::default() };
    let mut learner = Learner::new(Decoder::random(arch, 1, device), plan, optim, runtime);
    learner.model.set_residency(Residency::Pass).expect("weights in their place");
    let rows = rows();
    for _ in 0..2 {
        let _ = learner.runtime.take_most();
        learner.update(&rows, 1.0, &Nll, 1e-4).expect("an update");
    }
    let parameters = learner.runtime.accounts.balance(Category::Parameters, Home::Device);
    assert!(parameters.peak_bytes > 0);
    learner.runtime.take_most() - before
}

fn predictions_are_within_15_percent_of_what_the_pool_counts(device: &Device) {
    for (name, turn_on) in PLANS {
        let mut memory = MemoryConfig { gradient_checkpointing: true, ..MemoryConfig::default() };
        turn_on(&mut memory);
        hold(name, &arch(), &memory, device);
    }
    checked("predictions against a pool", PLANS.len());
}

fn predictions_of_linear_attention_are_within_15_percent_of_what_the_pool_counts(device: &Device) {
    for gradient_checkpointing in [false, true] {
        let memory = MemoryConfig { gradient_checkpointing, ..MemoryConfig::default() };
        let name = format!("linear attention, gradient_checkpointing {gradient_checkpointing}");
        hold(&name, &linear(), &memory, device);
    }
}

fn hold(name: &str, arch: &Arch, memory: &MemoryConfig, device: &Device) {
    let predicted = predicted(arch.clone(), memory, device);
    let counted = counted(arch.clone(), memory, device);
    let apart = predicted as f64 / counted as f64 - 1.0;
    let said = format!("{name}: {predicted} bytes predicted, {counted} counted, {:+.1} %", 100.0 * apart);
    report(&said);
    assert!(apart.abs() <= TOLERANCE, "{said}");
}

/// The vocabulary of Gemma 3, rows of a chunk, and hidden dimensions: few, so that logits are what counts.
const VOCABULARY: usize = 262_144;
const ROWS: usize = 128;
const HIDDEN: usize = 16;
const TEMPERATURE: f64 = 0.8;

/// A model whose head is large, and rows for it.
struct Chunk {
    decoder: Decoder,
    hidden: Tensor<2>,
    targets: Tensor<1, Int>,
}

impl Chunk {
    fn new(device: &Device) -> Self {
        let config = json!({
            "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-6
        });
        let Value::Object(config) = config else { unreachable!("an object") };
        let arch = Arch::from_config(&config, Path::new("test")).expect("a valid architecture");
        let numbers = (0..ROWS * HIDDEN).map(|i| (i as f32 * 0.37).sin());
        let hidden = TensorData::new(numbers.collect::<Vec<f32>>(), [ROWS, HIDDEN]);
        let targets: Vec<i32> = (0..ROWS).map(|i| (i * 2377 % VOCABULARY) as i32).collect();
        Self {
            decoder: Decoder::random(arch, 1, device),
            hidden: Tensor::from_data(hidden, device),
            targets: Tensor::from_data(TensorData::new(targets, [ROWS]), device),
        }
    }

    fn head(&self) -> Weights {
        self.decoder.weights(self.decoder.units().len() - 1)
    }
}

/// Log-probs, entropies, and the gradients of hidden rows and projection, of a chunk; with the bytes by which the pools
/// grow. A thread has pools of its own, which are empty at first.
fn grown(device: &Device, work: fn(&Chunk) -> [Tensor<2>; 4]) -> (u64, [Vec<f64>; 4]) {
    let measure = || {
        let chunk = Chunk::new(device);
        let before = read(device).reserved_bytes;
        let made = work(&chunk);
        (read(device).reserved_bytes - before, made.map(values))
    };
    std::thread::scope(|scope| scope.spawn(measure).join()).expect("a thread that ends well")
}

/// As whole logits on the graph.
fn with_logits(chunk: &Chunk) -> [Tensor<2>; 4] {
    let leaf = |t: &Tensor<2>| t.clone().autodiff().require_grad();
    let projection = chunk.head().get(Slot::Projection).expect("a head of its own");
    let (x, w) = (leaf(&chunk.hidden), leaf(&projection));
    let mean = (x.clone() * x.clone()).mean_dim(1);
    let normed = x.clone() * (mean + 1e-6).sqrt().recip();
    let logits = normed.matmul(w.clone().transpose()) / TEMPERATURE;
    let logps = log_softmax(logits, 1);
    let targets = chunk.targets.clone().reshape([ROWS, 1]);
    let logp = logps.clone().gather(1, targets);
    let entropy = (logps.clone().exp() * logps).sum_dim(1).neg();
    let mut grads = (logp.clone() + entropy.clone()).sum().backward();
    let d_x = x.grad_remove(&mut grads).expect("a leaf");
    let d_w = w.grad_remove(&mut grads).expect("a leaf");
    [logp.inner(), entropy.inner(), d_x, d_w]
}

/// By tiles of the vocabulary, whose logits are computed again.
fn with_tiles(chunk: &Chunk) -> [Tensor<2>; 4] {
    in_tiles(chunk, true)
}

fn in_tiles(chunk: &Chunk, recomputes: bool) -> [Tensor<2>; 4] {
    let weights = chunk.head();
    let head = chunk.decoder.head_with(&weights);
    let scored = head.chunk(chunk.hidden.clone(), chunk.targets.clone(), TEMPERATURE, recomputes);
    let scores = scored.scores.clone();
    let ones = Tensor::<1>::ones([ROWS], &chunk.hidden.device());
    let mut projection = None;
    let gradients = scored.backward(&ones, Some(&ones), &mut projection);
    [
        scores.logp.reshape([ROWS, 1]),
        scores.entropy.reshape([ROWS, 1]),
        gradients.hidden,
        projection.expect("the head trains"),
    ]
}

fn the_head_of_a_large_vocabulary_needs_a_twentieth_of_what_whole_logits_need(device: &Device) {
    let (whole, expected) = grown(device, with_logits);
    // the gradient of the projection is the result, not what it takes
    let result = (VOCABULARY * HIDDEN * 4) as u64;
    let is_enough = |bytes: u64| 20 * (bytes - result) <= whole - result;
    // a busy machine may give pages back too late to be taken again: what it needs is what one of a few tries takes
    let mut tiled = u64::MAX;
    for _ in 0..5 {
        let (bytes, found) = grown(device, with_tiles);
        for (found, expected) in found.iter().zip(&expected) {
            assert_gradient("tiles against whole logits", found, expected, 1e-4);
        }
        tiled = tiled.min(bytes);
        if is_enough(tiled) {
            break;
        }
    }
    let said = format!("{tiled} bytes by tiles, {whole} with whole logits, {result} of them the result");
    report(&format!("a head of {ROWS} rows and {VOCABULARY} tokens: {said}"));
    assert!(is_enough(tiled), "{said}");
}

fn logits_that_are_kept_give_the_gradients_of_recomputed_ones_to_the_bit(device: &Device) {
    let (recomputed_bytes, recomputed) = grown(device, with_tiles);
    let (kept_bytes, kept) = grown(device, |chunk| in_tiles(chunk, false));
    assert_eq!(kept, recomputed);
    assert!(kept_bytes > recomputed_bytes, "{kept_bytes} bytes with logits, {recomputed_bytes} without");
}
