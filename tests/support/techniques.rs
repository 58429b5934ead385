//! The table of memory techniques: every one by itself, and the combinations that are compared with the plain plan.
//!
//! A new technique joins this table before it joins the docs.

use firebrick_engine::plan::{Granularity, MemoryConfig, MomentKind, OptimizerOffload, Order, Packing, ParamOffload};
use firebrick_models::random::Stream;

/// A technique, and the settings that turn it on.
pub type Technique = (&'static str, fn(&mut MemoryConfig));

/// How segments keep what their backward needs: one at a time.
pub const KEEPS: [Technique; 6] = [
    ("every layer checkpointed", |m| {
        m.gradient_checkpointing = true;
    }),
    ("every second layer checkpointed", |m| {
        m.gradient_checkpointing = true;
        m.checkpoint_every = 2;
    }),
    ("listed layers checkpointed", |m| {
        m.gradient_checkpointing = true;
        m.checkpoint_layers = Some(vec![0]);
    }),
    ("half of the layers checkpointed", |m| {
        m.gradient_checkpointing = true;
        m.checkpoint_ratio = Some(0.5);
    }),
    ("no layer checkpointed, by ratio", |m| {
        m.gradient_checkpointing = true;
        m.checkpoint_ratio = Some(0.0);
    }),
    ("halves checkpointed", |m| {
        m.gradient_checkpointing = true;
        m.recompute_granularity = Granularity::Half;
    }),
];

/// Techniques that go with any way of keeping.
pub const ANYWHERE: [Technique; 6] = [
    ("small head chunks", |m| m.head_rows = 3),
    ("attention in chunks", |m| m.attention_rows = 3),
    ("padded rows", |m| m.packing = Packing::Padded),
    ("gradients on the host", |m| m.grad_offload = true),
    ("gradients on the host, copied in place", |m| {
        m.grad_offload = true;
        m.prefetch = 0;
    }),
    ("weights away while idle", |m| {
        m.param_offload = ParamOffload::Idle;
    }),
];

/// Techniques that need inputs to be kept.
pub const CHECKPOINTED: [Technique; 6] = [
    ("inputs on the host", |m| m.activation_offload = true),
    ("inputs on the host, in groups, three in flight", |m| {
        m.activation_offload = true;
        m.activation_offload_group = 2;
        m.prefetch = 3;
    }),
    ("inputs on the host, copied in place", |m| {
        m.activation_offload = true;
        m.prefetch = 0;
    }),
    ("weights streamed", |m| {
        m.param_offload = ParamOffload::Streamed;
    }),
    ("weights streamed, segment by segment", |m| {
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
    }),
    ("weights streamed, copied in place", |m| {
        m.param_offload = ParamOffload::Streamed;
        m.order = Order::SegmentMajor;
        m.prefetch = 0;
    }),
];

/// Where and how the optimizer works.
pub const OPTIMIZERS: [Technique; 5] = [
    ("state away between updates", |m| {
        m.optimizer_offload = OptimizerOffload::Idle;
    }),
    ("updated on the host", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
    }),
    ("half of it updated on the host", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.offload_fraction = 0.5;
    }),
    ("updated in the backward pass", |m| {
        m.step_in_backward = true;
    }),
    ("updated on the host in the backward pass", |m| {
        m.optimizer_offload = OptimizerOffload::Cpu;
        m.step_in_backward = true;
    }),
];

/// Moments in fewer bits: the same gradients, another update.
pub const MOMENTS: [Technique; 2] =
    [("bf16 moments", |m| m.moments = MomentKind::Bf16), ("8-bit moments", |m| m.moments = MomentKind::Block8)];

/// The settings of some techniques together.
pub fn settings(parts: &[Technique]) -> (String, MemoryConfig) {
    let mut config = MemoryConfig::default();
    for (_, turn_on) in parts {
        turn_on(&mut config);
    }
    let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
    (names.join(" + "), config)
}

/// Every technique that a forward and backward pass meets, and combinations of two and three of them.
pub fn passes() -> Vec<(String, MemoryConfig)> {
    let mut table: Vec<Vec<Technique>> = Vec::new();
    let every = KEEPS[0];
    table.extend(ANYWHERE.iter().map(|&t| vec![t]));
    for keep in KEEPS {
        table.push(vec![keep]);
        table.extend(CHECKPOINTED.iter().map(|&t| vec![keep, t]));
    }
    for anywhere in ANYWHERE {
        table.push(vec![every, anywhere]);
        table.extend(CHECKPOINTED.iter().map(|&t| vec![every, anywhere, t]));
    }
    table.push(vec![KEEPS[5], ANYWHERE[0], ANYWHERE[1], ANYWHERE[3], CHECKPOINTED[1], CHECKPOINTED[4]]);
    let made = table.iter().map(|parts| settings(parts));
    // a graph that is kept pins its weights: the combination is refused, which another test looks at
    made.filter(|(_, m)| {
        let all = m.checkpoint_layers.is_none() && m.checkpoint_ratio.is_none();
        all || m.param_offload != ParamOffload::Streamed
    })
    .collect()
}

/// Every place for the optimizer, by itself and under streamed weights and gradients on the host.
pub fn optimizers() -> Vec<(String, MemoryConfig)> {
    let (every, streamed) = (KEEPS[0], CHECKPOINTED[4]);
    let mut table: Vec<Vec<Technique>> = OPTIMIZERS.iter().map(|&t| vec![t]).collect();
    for optimizer in OPTIMIZERS {
        table.push(vec![optimizer, ANYWHERE[3]]);
        table.push(vec![optimizer, every, streamed]);
        table.push(vec![optimizer, every, streamed, ANYWHERE[3]]);
    }
    table.push(vec![every, streamed]);
    table.iter().map(|parts| settings(parts)).collect()
}

/// A sixth of a table's cases, the next sixth at the next call: CI's fixed sample where `plans.rs` with kernels
/// compares every case. The nightly test `techniques` takes all.
pub fn sample<T>(turn: &mut usize, table: Vec<T>) -> Vec<T> {
    if super::is_campaign("techniques") {
        return table;
    }
    let first = *turn % 6;
    *turn += 1;
    table.into_iter().skip(first).step_by(6).collect()
}

/// A combination drawn at random: each technique with even odds, one way of keeping.
pub fn drawn(random: &mut Stream) -> (String, MemoryConfig) {
    let mut parts = vec![KEEPS[random.below(KEEPS.len() as u32) as usize]];
    let all = ANYWHERE.iter().chain(&CHECKPOINTED).chain(&OPTIMIZERS);
    parts.extend(all.filter(|_| random.below(2) == 1).copied());
    settings(&parts)
}
