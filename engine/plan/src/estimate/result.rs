//! The result of an estimate: bytes by phase and category, and seconds of a step.

use crate::estimate::{EstimatePhase, PhaseTraffic};
use firebrick_spec::Category;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bytes of a phase at its peak.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PhaseEstimate {
    /// Which phase it is.
    pub name: EstimatePhase,
    /// Reserved device bytes: what is in use, and what the pool adds.
    pub total_bytes: u64,
    /// Host bytes; where host and device are one memory they are among the device's.
    pub host_bytes: u64,
    /// The work at the peak.
    pub moment: String,
    /// Device bytes by category; they add up to `total_bytes`.
    pub categories: BTreeMap<Category, u64>,
    /// With pipeline stages, the one whose device bytes these are, from 0. Host bytes are the most that any stage has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
}

impl PhaseEstimate {
    /// Renames the phase: of another model, or another part of the run.
    pub(super) fn named(mut self, name: EstimatePhase) -> Self {
        self.name = name;
        self
    }

    /// Adds bytes of a checkpoint that is written meanwhile, in the one memory of host and device.
    pub(super) fn add_save(&mut self, bytes: u64) {
        self.total_bytes += bytes;
        *self.categories.entry(Category::Buffers).or_default() += bytes;
    }
}

/// Bytes and seconds of a plan.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Estimate {
    /// Most reserved device bytes of any phase.
    pub peak_bytes: u64,
    /// Most host bytes of any phase.
    pub host_peak_bytes: u64,
    /// In the order of a step.
    pub phases: Vec<PhaseEstimate>,
    /// True if a checkpoint may be written during the next step, until its first update: it raises no peak.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub saves_beside: bool,
    /// Seconds of a step, every completion as long as allowed; of stages the slowest one's, in each phase.
    pub seconds: Seconds,
    /// Traffic of one of several devices in a step; with stages, the most of any stage by kind. Its seconds are among
    /// those of the phases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub communication: Vec<PhaseTraffic>,
}

impl Estimate {
    /// The phase with the peak.
    pub fn peak_phase(&self) -> Option<&PhaseEstimate> {
        self.phases.iter().max_by_key(|p| p.total_bytes)
    }

    /// The prediction for a phase; `None` if the run has no such phase.
    pub fn phase(&self, name: EstimatePhase) -> Option<&PhaseEstimate> {
        self.phases.iter().find(|p| p.name == name)
    }
}

/// Estimated seconds of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct Seconds {
    /// Sampling.
    pub rollout: f64,
    /// Scoring by policy and reference.
    pub score: f64,
    /// Forward and backward of all micro-batches, over all epochs.
    pub backward: f64,
    /// Updates.
    pub optimizer: f64,
    /// Scores of the reward models.
    #[serde(default)]
    pub reward: f64,
    /// The critic's values.
    #[serde(default)]
    pub values: f64,
    /// Its forward and backward of all micro-batches, over all epochs.
    #[serde(default)]
    pub critic_backward: f64,
    /// Its updates.
    #[serde(default)]
    pub critic_optimizer: f64,
}

impl Seconds {
    /// Each phase, in the order of a step.
    pub fn by_phase(&self) -> [(EstimatePhase, f64); 8] {
        [
            (EstimatePhase::Rollout, self.rollout),
            (EstimatePhase::Reward, self.reward),
            (EstimatePhase::Score, self.score),
            (EstimatePhase::Backward, self.backward),
            (EstimatePhase::Optimizer, self.optimizer),
            (EstimatePhase::Values, self.values),
            (EstimatePhase::CriticBackward, self.critic_backward),
            (EstimatePhase::CriticOptimizer, self.critic_optimizer),
        ]
    }

    /// The longer of two in every phase.
    pub(super) fn max(&self, other: &Self) -> Self {
        let [ours, theirs] = [self, other].map(|seconds| seconds.by_phase().map(|(_, seconds)| seconds));
        let mut longer = ours.into_iter().zip(theirs).map(|(a, b)| a.max(b));
        let longer = [(); 8].map(|()| longer.next().unwrap_or_default());
        let [rollout, reward, score, backward, optimizer, values, critic_backward, critic_optimizer] = longer;
        Self { rollout, score, backward, optimizer, reward, values, critic_backward, critic_optimizer }
    }

    /// The whole step.
    pub fn total(&self) -> f64 {
        self.by_phase().iter().map(|(_, seconds)| seconds).sum()
    }
}
