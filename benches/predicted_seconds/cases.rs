//! Models, batches and plans.

use firebrick::engine::plan::{Granularity, MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload};
use firebrick::models::Arch;
use firebrick::models::adapter::LoraConfig;
use serde_json::{Value, json};
use std::path::Path;

/// A model, and what a step has.
pub struct Shape {
    pub name: &'static str,
    pub arch: Arch,
    /// Most tokens of a prompt, and of a completion.
    pub lengths: [usize; 2],
    pub prompts: usize,
    pub group: usize,
}

/// Three that a profile's square products are no part of: deep and narrow with small matrices, a large tied vocabulary,
/// wide and shallow.
pub fn shapes() -> Vec<Shape> {
    let shape = |name, config: Value, lengths, prompts, group| {
        let config = config.as_object().expect("an object");
        Shape {
            name,
            arch: Arch::from_config(config, Path::new(name)).expect("a valid architecture"),
            lengths,
            prompts,
            group,
        }
    };
    vec![
        shape(
            "deep",
            json!({
                "model_type": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704,
                "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4
            }),
            [48, 64],
            6,
            4,
        ),
        shape(
            "vocabulary",
            json!({
                "model_type": "qwen3", "vocab_size": 24576, "hidden_size": 320, "intermediate_size": 960,
                "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64,
                "tie_word_embeddings": true
            }),
            [96, 48],
            4,
            4,
        ),
        shape(
            "wide",
            json!({
                "model_type": "qwen2", "vocab_size": 2048, "hidden_size": 640, "intermediate_size": 2240,
                "num_hidden_layers": 2, "num_attention_heads": 10, "num_key_value_heads": 2
            }),
            [32, 96],
            4,
            6,
        ),
    ]
}

/// Settings by name, and whether adapters alone are trained.
pub struct PlanCase {
    pub name: &'static str,
    pub turn_on: fn(&mut MemoryConfig),
    pub adapters: bool,
}

impl PlanCase {
    const fn new(name: &'static str, turn_on: fn(&mut MemoryConfig)) -> Self {
        Self { name, turn_on, adapters: false }
    }

    pub fn lora(&self) -> Option<LoraConfig> {
        self.adapters.then(LoraConfig::default)
    }
}

pub const PLANS: [PlanCase; 13] = [
    PlanCase::new("plain", |_| {}),
    PlanCase::new("every layer checkpointed", checkpointed),
    PlanCase::new("half of the layers checkpointed", |m| {
        checkpointed(m);
        m.checkpoint_ratio = Some(0.5);
    }),
    PlanCase::new("halves checkpointed", |m| {
        checkpointed(m);
        m.recompute_granularity = Granularity::Half;
    }),
    PlanCase::new("inputs on the host", |m| {
        checkpointed(m);
        m.activation_offload = true;
    }),
    PlanCase::new("weights streamed", |m| {
        checkpointed(m);
        m.param_offload = ParamOffload::Streamed;
    }),
    PlanCase::new("weights streamed, segment by segment", |m| {
        checkpointed(m);
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.micro_batch_size = Some(8);
    }),
    PlanCase::new("small head chunks", |m| m.head_rows = 64),
    PlanCase::new("four sequences a micro-batch", |m| {
        m.micro_batch_size = Some(4);
    }),
    PlanCase::new("gradients and optimizer on the host", |m| {
        m.grad_offload = true;
        m.optimizer_offload = OptimizerOffload::Cpu;
    }),
    PlanCase::new("bf16 moments", |m| m.moments = MomentKind::Bf16),
    PlanCase::new("8-bit moments", |m| m.moments = MomentKind::Block8),
    PlanCase { name: "adapters", turn_on: |_| {}, adapters: true },
];

fn checkpointed(memory: &mut MemoryConfig) {
    memory.gradient_checkpointing = true;
}
