//! The phases that an estimate has bytes of.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A phase of a run whose bytes are predicted, in the order of a run. Which of them a run has follows from its
/// workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EstimatePhase {
    /// Weights are read, once.
    Load,
    /// Forward and backward passes of a warm-up's step, before the first step.
    WarmupBackward,
    /// Its updates.
    WarmupOptimizer,
    /// Sampling.
    Rollout,
    /// Forward passes of the reward models.
    Reward,
    /// Forward passes of policy and reference.
    Score,
    /// Forward and backward passes of the policy.
    Backward,
    /// Its updates.
    Optimizer,
    /// Forward passes of the critic.
    Values,
    /// Its forward and backward passes.
    CriticBackward,
    /// Its updates.
    CriticOptimizer,
    /// A checkpoint is written.
    Save,
}

impl EstimatePhase {
    /// Its name, as plans are written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::WarmupBackward => "warmup_backward",
            Self::WarmupOptimizer => "warmup_optimizer",
            Self::Rollout => "rollout",
            Self::Reward => "reward",
            Self::Score => "score",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Values => "values",
            Self::CriticBackward => "critic_backward",
            Self::CriticOptimizer => "critic_optimizer",
            Self::Save => "save",
        }
    }

    /// Whether a step takes part in it: loading, saving and a warm-up are apart from the steps.
    #[must_use]
    pub const fn is_of_a_step(self) -> bool {
        match self {
            Self::Load | Self::WarmupBackward | Self::WarmupOptimizer | Self::Save => false,
            Self::Rollout
            | Self::Reward
            | Self::Score
            | Self::Backward
            | Self::Optimizer
            | Self::Values
            | Self::CriticBackward
            | Self::CriticOptimizer => true,
        }
    }

    /// Whether a model is updated in it.
    #[must_use]
    pub const fn is_update(self) -> bool {
        matches!(self, Self::WarmupOptimizer | Self::Optimizer | Self::CriticOptimizer)
    }
}

impl fmt::Display for EstimatePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
