//! A layer's mixer over 2,048 tokens, forward and backward: gated `DeltaNet` beside attention of the same width, in the shapes of
//! Qwen3.5-0.8B. Attention at 2,048 tokens is the case that shines for linear attention, at 256 tokens the one that hurts.
//!
//! `cargo bench --bench linear_attention [-- FILTER]`; `benches/side_by_side/delta_net.py` measures transformers' layer.
#![allow(clippy::print_stdout, reason = "a bench prints what it measured")]

#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;

use burn::tensor::{Device, Distribution, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput};
use firebrick::models::arch::Mixer;
use firebrick::models::attention::{Grouping, SequenceLayout};
use firebrick::models::forward_context::ForwardContext;
use firebrick::models::{Checkpoint, Decoder};
use serde_json::json;

/// Hidden size.
const WIDTH: usize = 1024;

/// Layers of both kinds in the shapes of Qwen3.5-0.8B, with random weights.
fn decoder(device: &Device) -> Decoder {
    let config = json!({
        "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 8192,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16
    });
    let config = config.as_object().expect("an object").clone();
    let checkpoint = Checkpoint::create(config, None, None).expect("a valid config");
    Decoder::random(checkpoint.arch().clone(), 1, device)
}

fn main() {
    let mut criterion = settings::criterion();
    let (device, info) = settings::device();
    println!("{} ({})", info.name, info.device);
    let decoder = decoder(&device);
    let mut group = criterion.benchmark_group("mixer");
    for tokens in [256, 2048] {
        group.throughput(Throughput::Elements(tokens as u64));
        for (name, mixer) in [
            ("gated_delta_net", Mixer::GatedDeltaNet),
            ("attention", Mixer::Attention),
        ] {
            let layer = decoder.arch().mixers.iter().position(|own| *own == mixer);
            let unit = 1 + 2 * layer.expect("a layer of each kind");
            group.bench_function(BenchmarkId::new(name, tokens), |b| {
                let pass = Pass::new(&decoder, unit, tokens);
                b.iter(|| pass.run());
            });
        }
    }
    group.finish();
    Criterion::final_summary(&criterion);
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
        let grouping = Grouping {
            waste: 0.0,
            queries: 0,
        };
        let layout = SequenceLayout::packed(&[tokens], grouping, device);
        Self {
            ctx: ForwardContext::whole(decoder.arch(), layout, 0, device),
            x: Tensor::random([tokens, WIDTH], Distribution::Normal(0.0, 1.0), device),
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
        let all = leaves
            .tensors()
            .filter_map(|leaf| leaf.grad_remove(&mut tape));
        assert_eq!((d_x.dims()[1], all.count()), (WIDTH, unit.specs.len()));
        self.decoder
            .device()
            .sync()
            .expect("a device that computes");
    }
}
