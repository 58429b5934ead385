//! Gated `DeltaNet` in the shapes of Qwen3.5-0.8B. `mixer`: a layer's mixer, forward and backward, beside attention of
//! the same width, and beside itself in tensor operations, without any kernel; 2,048 tokens is the case that shines for
//! linear attention, 256 tokens the one that hurts. `rule`: what is not a projection of that mixer (convolution, delta
//! rule, gated norm), over one sequence and over packed ones of many lengths. `decoding`: sampling from a model of four
//! layers.
//!
//! `cargo bench --bench linear_attention [-- FILTER]`; `benches/side_by_side/delta_net.py` measures the same in
//! transformers.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;

use burn::tensor::{Device, Distribution, Tensor};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};
use firebrick::backends::kernels::{
    DeltaHeads, SequenceRows, StateRows, causal_convolution, fused, gated_delta_rule, gated_rms_norm, set_enabled,
};
use firebrick::models::arch::Mixer;
use firebrick::models::attention::{Grouping, SequenceLayout};
use firebrick::models::forward_context::ForwardContext;
use firebrick::models::random::DrawKey;
use firebrick::models::{Checkpoint, Decoder, Prepack};
use firebrick::sampler::{GenerationRequest, Generator, SamplingParams, SchedulerConfig};
use serde_json::json;
use std::cell::LazyCell;

/// Hidden size.
fn width() -> usize {
    if settings::small() { 256 } else { 1024 }
}

/// Heads; small ones are a quarter as wide, for a software driver, which takes minutes to compile wide ones.
fn heads() -> DeltaHeads {
    let [count, dim] = if settings::small() { [4, 32] } else { [16, 128] };
    DeltaHeads { keys: count, values: count, key_dim: dim, value_dim: dim }
}

/// Sequences that are decoded at a time, tokens of their prompts, and new ones.
const DECODED: [usize; 3] = [16, 32, 64];

/// Layers of both kinds in the shapes of Qwen3.5-0.8B, with random weights and a feed-forward of this width.
fn decoder(device: &Device, feed_forward: usize) -> Decoder {
    let DeltaHeads { keys, values, key_dim, value_dim } = heads();
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": width(), "intermediate_size": feed_forward, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": width() / 4, "max_position_embeddings": 8192,
        "linear_num_key_heads": keys, "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim
    });
    let config = config.as_object().expect("an object").clone();
    let checkpoint = Checkpoint::create(config, None, None).expect("a valid config");
    Decoder::random(checkpoint.arch().clone(), 1, device)
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion = settings::criterion();
    let (device, info) = settings::device();
    println!("{} ({})", info.name, info.device);
    mixers(&mut criterion, &LazyCell::new(|| decoder(&device, 64)));
    rules(&mut criterion, &device);
    decoding(&mut criterion, &LazyCell::new(|| decoder(&device, 3584)));
    Criterion::final_summary(&criterion);
}

/// A decoder that is made where a case of it runs.
type Lazy<F> = LazyCell<Decoder, F>;

fn mixers<F: FnOnce() -> Decoder>(criterion: &mut Criterion, decoder: &Lazy<F>) {
    let mut group = criterion.benchmark_group("mixer");
    for tokens in [256, 2048] {
        group.throughput(Throughput::Elements(tokens as u64));
        for (name, mixer, kernels) in [
            ("gated_delta_net", Mixer::GatedDeltaNet, true),
            ("tensor_operations", Mixer::GatedDeltaNet, false),
            ("attention", Mixer::Attention, true),
        ] {
            group.bench_function(BenchmarkId::new(name, tokens), |b| {
                let layer = decoder.arch().mixers.iter().position(|own| *own == mixer);
                let unit = 1 + 2 * layer.expect("a layer of each kind");
                let pass = Pass::new(decoder, unit, tokens);
                set_enabled(kernels);
                b.iter(|| pass.run());
                set_enabled(true);
            });
        }
    }
    group.finish();
}

fn rules(criterion: &mut Criterion, device: &Device) {
    let mut group = criterion.benchmark_group("rule");
    for tokens in [256, 2048] {
        group.throughput(Throughput::Elements(tokens as u64));
        group.bench_function(BenchmarkId::new("gated_delta_net", tokens), |b| {
            let rule = Rule::new(&[tokens], device);
            b.iter(|| rule.run());
        });
    }
    for (name, most) in [("packed_to_250", 250), ("packed_to_31", 31)] {
        group.throughput(Throughput::Elements(2048));
        group.bench_function(BenchmarkId::new(name, 2048), |b| {
            let rule = Rule::new(&lengths(2048, most), device);
            b.iter(|| rule.run());
        });
    }
    group.finish();
}

fn decoding<F: FnOnce() -> Decoder>(criterion: &mut Criterion, decoder: &Lazy<F>) {
    let [sequences, prompt, new] = DECODED;
    let sampling = SamplingParams { max_new_tokens: new, ..SamplingParams::default() };
    let request = |index: usize| GenerationRequest {
        tokens: (0..prompt).map(|i| ((index * 7 + i * 13) % 64) as u32).collect(),
        key: DrawKey { seed: 1, step: 0, prompt_index: index as u32, sample: 0 },
        max_new_tokens: None,
    };
    let requests: Vec<GenerationRequest> = (0..sequences).map(request).collect();
    let panels = Prepack { panels: true, quantization: None };
    let mut group = criterion.benchmark_group("decoding");
    group.sampling_mode(SamplingMode::Flat);
    group.throughput(Throughput::Elements((sequences * new) as u64));
    group.bench_function(BenchmarkId::new("gated_delta_net", sequences), |b| {
        b.iter(|| {
            let generator = Generator::new(decoder, None, &sampling).expect("valid settings");
            let config = SchedulerConfig::new(sequences);
            let generator = generator.prepack(panels);
            let generated = generator.run_with(&requests, 1, &config, |_| {});
            let samples = generated.expect("samples").samples;
            assert!(samples.iter().all(|own| own.tokens.len() == new));
        });
    });
    group.finish();
}

/// Lengths of packed sequences from 2 tokens to `most`, so many tokens in all.
fn lengths(tokens: usize, most: usize) -> Vec<usize> {
    let mut left = tokens;
    let next = |i: usize| {
        let own = (2 + i * 37 % (most - 1)).min(left);
        left -= own;
        (own > 0).then_some(own)
    };
    (0..).map_while(next).collect()
}

/// What is no projection of a mixer, over packed sequences.
struct Rule {
    heads: DeltaHeads,
    sequences: SequenceRows,
    /// Queries, keys and values; z; the logs of decays; β; taps; the norm's weights.
    inputs: [Tensor<2>; 6],
}

impl Rule {
    fn new(lengths: &[usize], device: &Device) -> Self {
        let random = |shape| Tensor::random(shape, Distribution::Normal(0.0, 1.0), device);
        let own = heads();
        let heads = own.values;
        let mut tokens = 0;
        let sequences = lengths.iter().enumerate().map(|(slot, length)| {
            let first = tokens;
            tokens += length;
            StateRows { rows: first..tokens, slot, begins: true }
        });
        let sequences = SequenceRows::new(sequences.collect(), device);
        Self {
            heads: own,
            sequences,
            inputs: [
                random([tokens, own.channels()]),
                random([tokens * heads, own.value_dim]),
                random([tokens, heads]).abs().neg(),
                Tensor::random([tokens, heads], Distribution::Uniform(0.0, 1.0), device),
                random([own.channels(), 4]),
                random([1, own.value_dim]),
            ],
        }
    }

    /// Forward and backward, with gradients of all inputs.
    fn run(&self) {
        let inputs = self.inputs.clone().map(|x| x.autodiff().require_grad());
        let [qkv, z, g, beta, taps, w] = &inputs;
        let qkv = fused(|| causal_convolution(qkv, taps, &self.sequences)).expect("a kernel");
        let mixed = fused(|| gated_delta_rule([&qkv, g, beta], self.heads, &self.sequences)).expect("a kernel");
        let mixed = mixed.reshape(z.dims());
        let y = fused(|| gated_rms_norm(&mixed, z, w, 1e-6)).expect("a kernel");
        let up = self.inputs[1].clone().autodiff();
        let mut tape = (y * up).sum().backward();
        let all = inputs.iter().filter_map(|x| x.grad_remove(&mut tape));
        assert_eq!(all.count(), inputs.len());
        let device = self.inputs[0].device();
        device.sync().expect("a device that computes");
    }
}

/// A unit, and one sequence.
struct Pass<'a> {
    decoder: &'a Decoder,
    unit: usize,
    ctx: ForwardContext,
    x: Tensor<2>,
}

impl<'a> Pass<'a> {
    fn new(decoder: &'a Decoder, unit: usize, tokens: usize) -> Self {
        let device = decoder.device();
        let grouping = Grouping { waste: 0.0, queries: 0 };
        let layout = SequenceLayout::packed(&[tokens], grouping, device);
        Self {
            ctx: ForwardContext::whole(decoder.arch(), layout, 0, device),
            x: Tensor::random([tokens, width()], Distribution::Normal(0.0, 1.0), device),
            decoder,
            unit,
        }
    }

    /// Forward and backward, with gradients of the input and of all weights.
    fn run(&self) {
        let unit = &self.decoder.units()[self.unit];
        let leaves = unit.leaves(&self.decoder.weights(self.unit));
        let x = self.x.clone().autodiff().require_grad();
        let y = self.decoder.run(self.unit, &leaves, x.clone(), &self.ctx);
        let mut tape = (y * self.x.clone()).sum().backward();
        let d_x = x.grad_remove(&mut tape).expect("a leaf");
        let all = leaves.tensors().filter_map(|leaf| leaf.grad_remove(&mut tape));
        assert_eq!((d_x.dims()[1], all.count()), (width(), unit.specs.len()));
        self.decoder.device().sync().expect("a device that computes");
    }
}
