//! Memory decisions as plain data: what each segment of the chain keeps between forward and backward, where every byte
//! lives, and in which order work visits the device.

use crate::{Error, Result, Zero};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::{Arch, PipelineStage};
use firebrick_spec::{Home, Role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Activations that a segment keeps for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationPolicy {
    /// Its graph.
    Graph,
    /// Its input, here or on the host; the segment runs again on the way back (gradient checkpointing).
    Input(Home),
}

/// Consecutive units that are run, kept and differentiated together.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Segment {
    /// Indices in the decoder's chain; embedding and head are never part of one.
    pub units: Range<usize>,
    /// Its kept activations.
    pub keep: ActivationPolicy,
    /// Location of its weights: on the host they visit the device while the segment runs (streamed).
    pub weights: Home,
}

/// Format in which moments are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MomentKind {
    /// 4 bytes each.
    #[default]
    F32,
    /// 2 bytes each.
    Bf16,
    /// 1 byte each, with a scale per 256 (8-bit `AdamW`).
    Block8,
}

/// Nesting of the loops over micro-batches and segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// One micro-batch after the other.
    #[default]
    MicroMajor,
    /// One segment after the other: weights are fetched once, and activations of all micro-batches are kept.
    SegmentMajor,
}

/// Returns true if sequences share a prefix: if that saves more than a twentieth of their rows. Each part of a tree is
/// a span of keys more for attention, and the CPU's backward pass runs through a tree by one thread for each key head, so
/// that a chat template's first tokens are no reason to join all prompts.
pub fn sharing_pays(rows_shared: u64, rows_repeated: u64) -> bool {
    20 * rows_shared < 19 * rows_repeated
}

/// Layout of the sequences of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// One behind the other: no row stands for padding.
    #[default]
    Packed,
    /// Each as many rows as the longest of them.
    Padded,
    /// One behind the other; a prefix that several sequences begin with is there once, before the other rows of each;
    /// prefixes nest.
    SharedPrefix,
}

impl Layout {
    /// The layout of training micro-batches under a plan's: adapters with dropout drop other inputs for each sequence,
    /// so no row is shared.
    #[must_use]
    pub fn in_training(self, lora: Option<&LoraConfig>) -> Self {
        match self {
            Self::SharedPrefix if lora.is_some_and(|lora| lora.dropout > 0.0) => Self::Packed,
            layout => layout,
        }
    }
}

/// Placement of the optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct OptimizerPlan {
    /// Location of moments (and, on the host, f32 masters) and of the update.
    pub home: Home,
    /// With `home: host`: the share of the parameters, by count, whose state is on the host; the rest stays on the
    /// device.
    pub offload_fraction: f64,
    /// With `home: device`: where moments wait while other phases run.
    pub idle: Home,
    /// Format of moments.
    pub moments: MomentKind,
    /// Each segment is updated as soon as its gradient is complete, on the last micro-batch.
    pub in_backward: bool,
}

/// The plan of one model.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ModelPlan {
    /// The chain between embedding and head, cut.
    pub segments: Vec<Segment>,
    /// Location of the weights of embedding and head; tied ones are always on the device.
    pub ends: Home,
    /// Location of the whole model in phases that do not use it.
    pub idle: Home,
    /// Location of accumulated gradients.
    pub grads: Home,
    /// Placement of the optimizer.
    pub optimizer: OptimizerPlan,
    /// State that data-parallel ranks shard.
    #[serde(default)]
    pub zero: Zero,
    /// Under the third stage: whether a segment's gathered weights are freed after its forward pass and gathered again
    /// for its backward.
    #[serde(default = "yes")]
    pub reshard_after_forward: bool,
    /// In which order micro-batches and segments meet.
    pub order: Order,
    /// Rows that the head projects at a time: logits of more never exist.
    pub head_rows: usize,
    /// On GPUs that take the vocabulary in tiles: a chunk's logits are computed again for its gradient, not kept.
    #[serde(default = "yes")]
    pub recompute_logits: bool,
    /// Queries that attention scores at a time in sequences longer than that; 0 scores all at once.
    pub attention_rows: usize,
    /// Layout of sequences in a micro-batch.
    pub layout: Layout,
    /// Most rows of a training micro-batch: tokens, and padding if there is any.
    pub train_tokens: usize,
    /// Most rows of a forward-only micro-batch.
    pub score_tokens: usize,
    /// Most sequences of a micro-batch, where a fixed size is wanted.
    pub micro_batch_size: Option<usize>,
    /// Copies in flight between host and device; 0 copies in place.
    pub prefetch: usize,
    /// Kept inputs that are copied to the host together.
    pub offload_group: usize,
}

fn yes() -> bool {
    true
}

/// Units between embedding and head: two halves a layer.
pub(crate) fn body(arch: &Arch) -> Range<usize> {
    units(0..arch.num_layers)
}

/// Units of a stage.
pub(crate) fn body_of(arch: &Arch, stage: PipelineStage) -> Range<usize> {
    units(stage.layers(arch.num_layers))
}

/// Units of a layer.
pub(crate) fn layer(index: usize) -> Range<usize> {
    units(index..index + 1)
}

fn units(layers: Range<usize>) -> Range<usize> {
    1 + 2 * layers.start..1 + 2 * layers.end
}

impl ModelPlan {
    /// One segment that keeps its graph, and everything on the device: the fastest plan, and the yardstick of every
    /// other one. Techniques write their settings into it.
    pub(crate) fn plain(arch: &Arch) -> Self {
        let whole = Segment { units: body(arch), keep: ActivationPolicy::Graph, weights: Home::Device };
        Self { segments: vec![whole], reshard_after_forward: true, offload_group: 1, ..Self::default() }
    }

    /// True if weights and optimizer state are always on the device.
    pub(crate) fn stays_on_device(&self) -> bool {
        let segments = self.segments.iter().map(|segment| segment.weights);
        let OptimizerPlan { home, idle, .. } = self.optimizer;
        segments.chain([self.ends, self.idle, home, idle]).all(|home| home == Home::Device)
    }

    /// Rejects segments that do not cover the model's layers in order.
    pub(crate) fn check_units(&self, arch: &Arch) -> Result<()> {
        let body = body(arch);
        let mut next = body.start;
        for Segment { units, .. } in &self.segments {
            if units.start != next || units.is_empty() {
                return Err(Error::Plan(format!(
                    "segments should follow each other from unit {next} on, and one covers units {units:?}"
                )));
            }
            next = units.end;
        }
        if next != body.end {
            return Err(Error::Plan(format!(
                "segments end at unit {next}; the model's layers end at unit {}",
                body.end
            )));
        }
        Ok(())
    }

    /// The plan of a part of the chain: the parts of its segments that lie there.
    #[must_use]
    pub fn within(mut self, part: &Range<usize>) -> Self {
        let here = |segment: Segment| {
            let units = segment.units.start.max(part.start)..segment.units.end.min(part.end);
            (!units.is_empty()).then_some(Segment { units, ..segment })
        };
        self.segments = self.segments.into_iter().filter_map(here).collect();
        self
    }
}

/// The plan of sampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct RolloutPlan {
    /// Most sequences sampled at a time.
    pub max_num_seqs: usize,
}

/// Every memory decision of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Plan {
    /// One plan per model.
    pub models: BTreeMap<Role, ModelPlan>,
    /// Sampling.
    pub rollout: RolloutPlan,
}

impl Plan {
    /// The policy's plan.
    pub fn policy(&self) -> &ModelPlan {
        &self.models[&Role::Policy]
    }

    /// The reference policy's plan, if there is one.
    pub fn reference(&self) -> Option<&ModelPlan> {
        self.models.get(&Role::Reference)
    }

    /// The critic's plan, if there is one.
    pub fn critic(&self) -> Option<&ModelPlan> {
        self.models.get(&Role::Critic)
    }
}
