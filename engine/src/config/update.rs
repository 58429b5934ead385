//! The `update` section.

use serde::{Deserialize, Serialize};

/// Where `old` log-probs come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OldLogProbs {
    /// Recomputed by the trainer's forward (the default): exact for the policy being trained.
    Trainer,
    /// The sampler's own full-distribution ones: one forward saved.
    Sampler,
}

/// How rollouts become optimizer steps.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateConfig {
    /// Passes over a step's rollouts.
    pub ppo_epochs: usize,
    /// Prompts (groups) an optimizer step; all of the step's where absent.
    pub ppo_mini_batch_size: Option<usize>,
    /// Source of the old log-probs.
    pub old_log_probs: OldLogProbs,
}

impl Default for UpdateConfig {
    fn default() -> Self {
        Self { ppo_epochs: 1, ppo_mini_batch_size: None, old_log_probs: OldLogProbs::Trainer }
    }
}
