//! Memory decisions as plain data: what each segment of the chain keeps between forward and backward.

use crate::{Error, Result};
use firebrick_models::Arch;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What a segment leaves behind in the forward pass for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Its graph.
    Graph,
    /// Its input; the segment runs again on the way back (gradient checkpointing).
    Input,
}

/// Consecutive units that are run, kept and differentiated together.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Segment {
    /// Indices in the decoder's chain; embedding and head are never part of one.
    pub units: Range<usize>,
    /// What it keeps.
    pub keep: Keep,
}

/// The plan of one model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct ModelPlan {
    /// The chain between embedding and head, cut.
    pub segments: Vec<Segment>,
    /// Rows that the head projects at a time: logits of more never exist.
    pub head_rows: usize,
    /// Most tokens of a training micro-batch, padding included.
    pub train_tokens: usize,
    /// Most tokens of a forward-only micro-batch.
    pub score_tokens: usize,
}

impl ModelPlan {
    /// One segment that keeps its graph: the fastest, and the yardstick of every other plan.
    #[must_use]
    pub fn plain(arch: &Arch, config: &MemoryConfig) -> Self {
        Self::cut(arch, config, 2 * arch.num_layers, Keep::Graph)
    }

    /// Segments of `blocks` layers that keep their inputs.
    #[must_use]
    pub fn checkpoint_every(arch: &Arch, config: &MemoryConfig, blocks: usize) -> Self {
        Self::cut(arch, config, 2 * blocks, Keep::Input)
    }

    fn cut(arch: &Arch, config: &MemoryConfig, units: usize, keep: Keep) -> Self {
        let body = 1..1 + 2 * arch.num_layers;
        let segments = body
            .clone()
            .step_by(units.max(1))
            .map(|start| Segment {
                units: start..(start + units.max(1)).min(body.end),
                keep,
            })
            .collect();
        Self {
            segments,
            head_rows: config.head_rows,
            train_tokens: config.train_tokens,
            score_tokens: config.score_tokens,
        }
    }
}

/// The `memory` section of a configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// Keep segment inputs and recompute on the way back, instead of keeping the whole graph
    /// (verl's `enable_gradient_checkpointing`).
    pub gradient_checkpointing: bool,
    /// Layers a segment (`NeMo` RL's `checkpoint_every`).
    pub checkpoint_every: usize,
    /// Rows that the head projects at a time.
    pub head_rows: usize,
    /// Most tokens of a training micro-batch, padding included; hard (verl's `ppo_max_token_len_per_gpu`).
    pub train_tokens: usize,
    /// Most tokens of a forward-only micro-batch (verl's `log_prob_max_token_len_per_gpu`).
    pub score_tokens: usize,
    /// Most sequences of a micro-batch, where a fixed size is wanted (verl's `ppo_micro_batch_size_per_gpu`).
    pub micro_batch_size: Option<usize>,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            gradient_checkpointing: false,
            checkpoint_every: 1,
            head_rows: 1024,
            train_tokens: 16_384,
            score_tokens: 32_768,
            micro_batch_size: None,
        }
    }
}

impl MemoryConfig {
    /// The plan that these settings spell out.
    pub fn plan(&self, arch: &Arch) -> Result<ModelPlan> {
        let sizes = [
            ("checkpoint_every", self.checkpoint_every),
            ("head_rows", self.head_rows),
            ("train_tokens", self.train_tokens),
            ("score_tokens", self.score_tokens),
            ("micro_batch_size", self.micro_batch_size.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::Config(format!("memory.{key} should be at least 1")));
        }
        Ok(if self.gradient_checkpointing {
            ModelPlan::checkpoint_every(arch, self, self.checkpoint_every)
        } else {
            ModelPlan::plain(arch, self)
        })
    }
}
