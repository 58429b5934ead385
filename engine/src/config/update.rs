//! The `update` section.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Source of the old log-probs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// A forward pass of the trainer.
    Trainer,
    /// The sampler, which saves that pass.
    Sampler,
}

/// How rollouts are divided into optimizer steps.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateConfig {
    /// Passes over a step's rollouts.
    #[default(1)]
    #[schemars(range(min = 1))]
    pub ppo_epochs: usize,
    /// Prompts per optimizer step; must divide `trainer.train_batch_size`. `null`: all.
    #[schemars(range(min = 1))]
    pub ppo_mini_batch_size: Option<usize>,
    /// Source of the old log-probs. `null`: the sampler if its log-probs are the trainer's to the bit (`rollout.exact`),
    /// otherwise the trainer.
    pub old_log_probs: Option<OldLogProbs>,
}
