//! The feed-forward of a layer with experts beside a dense one of the same active operations: forward and backward of
//! many rows, and a forward of few, as in decoding.
//!
//! `cargo bench --bench experts` (`-- backward`, `-- decoding`). Throughput is operations of products, those of experts
//! that a token goes through: figures of the two kinds are compared as they stand.
#![allow(missing_docs, reason = "criterion's macros")]

#[path = "support/allocator.rs"]
mod allocator;
#[path = "support/settings.rs"]
#[allow(dead_code, reason = "each bench uses its own part")]
mod settings;

use burn::tensor::{Device, Distribution, Tensor};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, measurement::WallTime};
use firebrick::models::attention::{Grouping, SequenceLayout};
use firebrick::models::forward_context::ForwardContext;
use firebrick::models::weights::Weights;
use firebrick::models::{Arch, Decoder};
use serde_json::{Value, json};
use std::path::Path;

const HIDDEN: usize = 512;
/// Width of one expert, experts of a token, experts.
const EXPERTS: [usize; 3] = [256, 4, 32];
/// Rows of a training micro-batch, and of a decoding step.
const ROWS: [usize; 2] = [2048, 32];

/// A feed-forward half and the rows it runs on.
struct Half {
    decoder: Decoder,
    weights: Weights,
    unit: usize,
}

impl Half {
    fn new(family: &str, device: &Device) -> Self {
        let [width, per_token, count] = EXPERTS;
        let Value::Object(config) = json!({
            "model_type": family, "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": width * per_token,
            "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 32, "moe_intermediate_size": width,
            "num_experts": count, "num_experts_per_tok": per_token, "norm_topk_prob": true
        }) else {
            unreachable!("an object")
        };
        let arch = Arch::from_config(&config, Path::new(family)).expect("a valid architecture");
        let decoder = Decoder::random(arch, 1, device);
        let unit = decoder.body().end - 1;
        Self { weights: decoder.weights(unit), decoder, unit }
    }

    fn context(&self, rows: usize) -> ForwardContext {
        let (arch, device) = (self.decoder.arch(), self.decoder.device());
        let grouping = Grouping { waste: 0.0, queries: 0 };
        let rows = SequenceLayout::packed(&[rows], grouping, device);
        ForwardContext::whole(arch, rows, 0, device)
    }

    fn forward(&self, x: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        self.decoder.run(self.unit, &self.weights, x.clone(), ctx)
    }

    fn backward(&self, x: &Tensor<2>, ctx: &ForwardContext) {
        let leaves = self.decoder.units()[self.unit].leaves(&self.weights);
        let x = x.clone().autodiff().require_grad();
        let y = self.decoder.run(self.unit, &leaves, x.clone(), ctx);
        let mut gradients = y.sum().backward();
        assert!(x.grad_remove(&mut gradients).is_some());
    }
}

fn cases(group: &mut BenchmarkGroup<'_, WallTime>, rows: usize, run: fn(&Half, &Tensor<2>, &ForwardContext)) {
    let (device, _) = settings::device();
    for (name, family) in [("dense", "qwen3"), ("experts", "qwen3_moe")] {
        let half = Half::new(family, &device);
        let x = Tensor::<2>::random([rows, HIDDEN], Distribution::Normal(0.0, 1.0), &device);
        let ctx = half.context(rows);
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            b.iter(|| run(&half, &x, &ctx));
        });
    }
}

fn main() {
    allocator::as_in_the_program();
    let mut criterion: Criterion = settings::criterion();
    let [width, per_token, _] = EXPERTS;
    let forward = 2.0 * (3 * HIDDEN * width * per_token) as f64;
    for (name, rows, passes) in [("backward", ROWS[0], 3.0), ("decoding", ROWS[1], 1.0)] {
        let mut group = criterion.benchmark_group(format!("feed_forward/{name}"));
        group.throughput(Throughput::Elements((passes * forward * rows as f64) as u64));
        let run: fn(&Half, &Tensor<2>, &ForwardContext) = match name {
            "backward" => |half, x, ctx| half.backward(x, ctx),
            _ => |half, x, ctx| drop(half.forward(x, ctx)),
        };
        cases(&mut group, rows, run);
        group.finish();
    }
    criterion.final_summary();
}
