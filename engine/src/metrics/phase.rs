//! Phases of a run: their names, models, and the phases of the estimate that predict their bytes.

use crate::executor::Residency;
use crate::plan::Role;
use crate::plan::estimate::EstimatePhase;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Name of a phase, its models, and the phases of the estimate that predict its bytes.
type Properties = (&'static str, &'static [(Role, Residency)], &'static [EstimatePhase]);

macro_rules! phases {
    ($($(#[$doc:meta])+ $phase:ident: $name:literal, [$($role:ident in $residency:ident)?], [$($estimate:ident),*];)+) => {
        /// A part of a run, which memory errors name. All except [`SaveCheckpoint`](Self::SaveCheckpoint) are timed,
        /// and memory is read at their end.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
        pub enum Phase {
            $($(#[$doc])+ #[serde(rename = $name)] $phase,)+
        }

        impl Phase {
            /// All phases, in the order of a step.
            pub const ALL: [Self; [$(Self::$phase),+].len()] = [$(Self::$phase),+];

            fn properties(self) -> Properties {
                match self {
                    $(Self::$phase => (
                        $name,
                        &[$((Role::$role, Residency::$residency))?],
                        &[$(EstimatePhase::$estimate),*],
                    ),)+
                }
            }
        }
    };
}

phases! {
    /// Samples completions.
    Generate: "gen", [Policy in Rollout], [Rollout];
    /// Computes their rewards.
    Reward: "reward", [], [Reward];
    /// Samples a greedy completion of every prompt, `ReMax`'s baseline.
    GenerateBaseline: "gen_max", [Policy in Rollout], [Rollout];
    /// Computes the rewards of the greedy completions.
    RewardBaseline: "reward_max", [], [Reward];
    /// Log-probs under the policy before its update, and values where it has a value head.
    OldLogProbs: "old_log_prob", [Policy in Pass], [Score];
    /// Log-probs under the reference policy.
    ReferenceLogProbs: "ref", [Reference in Pass], [Score];
    /// The critic's values.
    Values: "values", [Critic in Pass], [Values];
    /// Computes advantages.
    Advantages: "adv", [], [];
    /// Updates the critic.
    UpdateCritic: "update_critic", [Critic in Pass], [CriticBackward, CriticOptimizer];
    /// Updates the policy.
    UpdateActor: "update_actor", [Policy in Pass], [Backward, Optimizer];
    /// Updates the policy in a supervised step of the warm-up.
    WarmUp: "warmup", [Policy in Pass], [WarmupBackward, WarmupOptimizer];
    /// Samples greedy completions of the validation prompts.
    Validation: "testing", [Policy in Rollout], [Rollout];
    /// Computes their rewards.
    ValidationReward: "testing_reward", [], [Reward];
    /// The loss of the validation examples of supervised training.
    ValidationLoss: "val_loss", [Policy in Pass], [Score];
    /// Writes a checkpoint, or the reference policy that a run keeps. A step reports the wait for it.
    SaveCheckpoint: "save_checkpoint", [], [];
}

impl Phase {
    /// Name in `timing_s/…`, in `memory.jsonl` and in messages; verl's if verl has the phase.
    pub fn name(self) -> &'static str {
        self.properties().0
    }

    /// The phase with a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }

    /// Models on the device and their residency; all others are idle. A run whose reference policy is its policy
    /// without adapters uses the policy in place of [`Role::Reference`]. Reward models load themselves.
    pub fn models(self) -> &'static [(Role, Residency)] {
        self.properties().1
    }

    /// Phases of the estimate that predict its bytes: those of an update are backward passes and the optimizer. Empty
    /// for a phase that computes nothing on the device.
    pub fn estimates(self) -> &'static [EstimatePhase] {
        self.properties().2
    }

    /// Model that it updates.
    pub fn updates(self) -> Option<Role> {
        let is_update = self.estimates().iter().any(|estimate| estimate.is_update());
        self.models().first().filter(|_| is_update).map(|(role, _)| *role)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Seconds by phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PhaseTimings(BTreeMap<Phase, f64>);

impl PhaseTimings {
    /// Adds the seconds of one execution of a phase.
    pub fn add(&mut self, phase: Phase, seconds: f64) {
        *self.0.entry(phase).or_default() += seconds;
    }

    /// Seconds of a phase; 0 of one that did not run.
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.0.get(&phase).copied().unwrap_or(0.0)
    }

    /// Seconds of all phases.
    pub fn total(&self) -> f64 {
        self.0.values().sum()
    }

    /// The phases that ran, in the order of [`Phase`], with their seconds.
    pub fn iter(&self) -> impl Iterator<Item = (Phase, f64)> {
        self.0.iter().map(|(&phase, &seconds)| (phase, seconds))
    }
}
