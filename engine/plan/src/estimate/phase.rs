//! The phases that an estimate has bytes of.

use crate::named::named;
use serde::{Deserialize, Serialize};
use std::fmt;

named! {
    /// A phase of a run whose bytes are predicted, in the order of a run. Which of them a run has follows from its
    /// workload.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
    pub enum EstimatePhase {
        /// Weights are read, once.
        Load = "load",
        /// Forward and backward passes of a warm-up's step, before the first step.
        WarmupBackward = "warmup_backward",
        /// Its updates.
        WarmupOptimizer = "warmup_optimizer",
        /// Sampling.
        Rollout = "rollout",
        /// Forward passes of the reward models.
        Reward = "reward",
        /// Forward passes of policy and reference.
        Score = "score",
        /// Forward and backward passes of the policy.
        Backward = "backward",
        /// Its updates.
        Optimizer = "optimizer",
        /// Forward passes of the critic.
        Values = "values",
        /// Its forward and backward passes.
        CriticBackward = "critic_backward",
        /// Its updates.
        CriticOptimizer = "critic_optimizer",
        /// A checkpoint is written.
        Save = "save",
    }
}

impl EstimatePhase {
    /// True if a step takes part in it: loading, saving and a warm-up are apart from the steps.
    pub const fn is_in_step(self) -> bool {
        !matches!(self, Self::Load | Self::WarmupBackward | Self::WarmupOptimizer | Self::Save)
    }

    /// True if it comes before the updates of a step, and reads the weights of the models that are trained.
    pub const fn is_before_updates(self) -> bool {
        matches!(self, Self::Rollout | Self::Reward | Self::Score | Self::Values)
    }

    /// True if a model is updated in it.
    pub const fn is_update(self) -> bool {
        matches!(self, Self::WarmupOptimizer | Self::Optimizer | Self::CriticOptimizer)
    }
}

impl fmt::Display for EstimatePhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
