//! The phases of a run: what each is called, which models it uses, and which phase of the estimate predicts its bytes.

use crate::executor::Residency;
use crate::plan::Role;
use crate::plan::estimate::EstimatePhase;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

const SAMPLES_POLICY: &[(Role, Residency)] = &[(Role::Policy, Residency::Rollout)];
const POLICY: &[(Role, Residency)] = &[(Role::Policy, Residency::Pass)];
const REFERENCE: &[(Role, Residency)] = &[(Role::Reference, Residency::Pass)];
const CRITIC: &[(Role, Residency)] = &[(Role::Critic, Residency::Pass)];

/// A part of a run whose memory errors name it. All but [`SaveCheckpoint`](Self::SaveCheckpoint) are timed, and memory
/// is read at their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Samples completions.
    Generate,
    /// Computes their rewards.
    Reward,
    /// Samples a greedy completion of every prompt, `ReMax`'s baseline.
    GenerateBaseline,
    /// Computes the rewards of the greedy completions.
    RewardBaseline,
    /// Log-probs under the policy before its update, and values where it has a value head.
    OldLogProbs,
    /// Log-probs under the reference policy.
    ReferenceLogProbs,
    /// The critic's values.
    Values,
    /// Computes advantages.
    Advantages,
    /// Updates the critic.
    UpdateCritic,
    /// Updates the policy.
    UpdateActor,
    /// Updates the policy in a supervised step of the warm-up.
    WarmUp,
    /// Samples greedy completions of the validation prompts.
    Validation,
    /// Computes their rewards.
    ValidationReward,
    /// The loss of the validation examples of supervised training.
    ValidationLoss,
    /// Writes a checkpoint, or the reference policy that a run keeps. It is not timed.
    SaveCheckpoint,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Self; 15] = [
        Self::Generate,
        Self::Reward,
        Self::GenerateBaseline,
        Self::RewardBaseline,
        Self::OldLogProbs,
        Self::ReferenceLogProbs,
        Self::Values,
        Self::Advantages,
        Self::UpdateCritic,
        Self::UpdateActor,
        Self::WarmUp,
        Self::Validation,
        Self::ValidationReward,
        Self::ValidationLoss,
        Self::SaveCheckpoint,
    ];

    /// Its name in `timing_s/…`, in `memory.jsonl` and in messages; verl's where verl has the phase.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Generate => "gen",
            Self::Reward => "reward",
            Self::GenerateBaseline => "gen_max",
            Self::RewardBaseline => "reward_max",
            Self::OldLogProbs => "old_log_prob",
            Self::ReferenceLogProbs => "ref",
            Self::Values => "values",
            Self::Advantages => "adv",
            Self::UpdateCritic => "update_critic",
            Self::UpdateActor => "update_actor",
            Self::WarmUp => "warmup",
            Self::Validation => "testing",
            Self::ValidationReward => "testing_reward",
            Self::ValidationLoss => "val_loss",
            Self::SaveCheckpoint => "save_checkpoint",
        }
    }

    /// The models it uses, and how; all others are idle. A run whose reference policy is its policy without adapters
    /// uses the policy where it says [`Role::Reference`]. Reward models come and go by themselves.
    #[must_use]
    pub fn models(self) -> &'static [(Role, Residency)] {
        match self {
            Self::Generate | Self::GenerateBaseline | Self::Validation => SAMPLES_POLICY,
            Self::OldLogProbs | Self::UpdateActor | Self::WarmUp | Self::ValidationLoss => POLICY,
            Self::ReferenceLogProbs => REFERENCE,
            Self::Values | Self::UpdateCritic => CRITIC,
            Self::Reward | Self::RewardBaseline | Self::ValidationReward | Self::Advantages | Self::SaveCheckpoint => {
                &[]
            }
        }
    }

    /// The phase of the estimate that predicts its bytes, of an update its first half; none of one that computes
    /// nothing on the device.
    #[must_use]
    pub fn estimated(self) -> Option<EstimatePhase> {
        self.estimates().first().copied()
    }

    /// All phases of the estimate that predict its bytes: an update runs backward passes and the optimizer.
    #[must_use]
    pub fn estimates(self) -> &'static [EstimatePhase] {
        match self {
            Self::Generate | Self::GenerateBaseline | Self::Validation => &[EstimatePhase::Rollout],
            Self::OldLogProbs | Self::ReferenceLogProbs | Self::ValidationLoss => &[EstimatePhase::Score],
            Self::Reward | Self::RewardBaseline | Self::ValidationReward => &[EstimatePhase::Reward],
            Self::Values => &[EstimatePhase::Values],
            Self::UpdateCritic => &[EstimatePhase::CriticBackward, EstimatePhase::CriticOptimizer],
            Self::UpdateActor => &[EstimatePhase::Backward, EstimatePhase::Optimizer],
            Self::WarmUp => &[EstimatePhase::WarmupBackward, EstimatePhase::WarmupOptimizer],
            Self::Advantages | Self::SaveCheckpoint => &[],
        }
    }

    /// The model that it updates.
    #[must_use]
    pub fn updates(self) -> Option<Role> {
        match self {
            Self::UpdateActor | Self::WarmUp => Some(Role::Policy),
            Self::UpdateCritic => Some(Role::Critic),
            Self::Generate
            | Self::Reward
            | Self::GenerateBaseline
            | Self::RewardBaseline
            | Self::OldLogProbs
            | Self::ReferenceLogProbs
            | Self::Values
            | Self::Advantages
            | Self::Validation
            | Self::ValidationReward
            | Self::ValidationLoss
            | Self::SaveCheckpoint => None,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Phase {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
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
    #[must_use]
    pub fn seconds(&self, phase: Phase) -> f64 {
        self.0.get(&phase).copied().unwrap_or(0.0)
    }

    /// Seconds of all phases.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.0.values().sum()
    }

    /// The phases that ran, in the order of [`Phase`], with their seconds.
    pub fn iter(&self) -> impl Iterator<Item = (Phase, f64)> {
        self.0.iter().map(|(&phase, &seconds)| (phase, seconds))
    }
}
