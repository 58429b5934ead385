//! The summary of a run, with predicted beside measured bytes.

use super::phase::Phase;
use crate::plan::estimate::{Estimate, EstimatePhase};
use serde::Serialize;
use std::collections::BTreeMap;

/// `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Finished steps.
    pub steps: u64,
    /// Seconds of training, over all sessions of the run.
    pub seconds: f64,
    /// Tokens sampled and trained on, a second.
    pub tokens_per_second: f64,
    /// First value of each validation metric.
    pub first: BTreeMap<String, f64>,
    /// Last value of each.
    pub last: BTreeMap<String, f64>,
    /// Peak that was predicted of the plan in force.
    pub predicted_peak_bytes: Option<u64>,
    /// Largest bytes measured on the device (on the CPU: the counted heap).
    pub measured_peak_bytes: u64,
    /// The same of each of several ranks, by rank; nothing of a run on one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rank_peak_bytes: Vec<u64>,
    /// The same by phase of the estimate.
    pub memory: Vec<PhaseMemory>,
    /// Times that a plan ran out of memory and the next cheaper one took over, in this session.
    pub replans: u64,
    /// Largest resident set of the process, where the system tells.
    pub peak_resident_bytes: Option<u64>,
    /// The device, as it is spelled.
    pub device: String,
    /// Float type of parameters and activations.
    pub precision: &'static str,
    /// Optimizer steps skipped for a non-finite gradient norm.
    pub skipped_steps: u64,
}

/// Predicted beside measured bytes of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseMemory {
    /// `rollout`, `score` or `update`; with a critic also `values` and `update_critic`, with a warm-up `warmup`.
    pub phase: &'static str,
    /// The estimate.
    pub predicted_bytes: u64,
    /// What was measured in this session (on the CPU the phase's peak, elsewhere reserved bytes at its end).
    pub measured_bytes: u64,
}

/// Phases of a run that are summed up together: a name, the phases, and those of the estimate that predict their bytes.
const GROUPS: [(&str, &[Phase], &[EstimatePhase]); 6] = [
    ("rollout", &[Phase::Generate, Phase::GenerateBaseline, Phase::Validation], &[EstimatePhase::Rollout]),
    ("score", &[Phase::OldLogProbs, Phase::ReferenceLogProbs], &[EstimatePhase::Score]),
    ("update", &[Phase::UpdateActor], &[EstimatePhase::Backward, EstimatePhase::Optimizer]),
    ("values", &[Phase::Values], &[EstimatePhase::Values]),
    ("update_critic", &[Phase::UpdateCritic], &[EstimatePhase::CriticBackward, EstimatePhase::CriticOptimizer]),
    ("warmup", &[Phase::WarmUp], &[EstimatePhase::WarmupBackward, EstimatePhase::WarmupOptimizer]),
];

/// Predicted beside measured bytes of the phases that ran, given the largest bytes of each.
#[must_use]
pub fn phase_memory(predicted: &Estimate, measured: &BTreeMap<Phase, u64>) -> Vec<PhaseMemory> {
    let groups = GROUPS.iter().filter_map(|&(phase, phases, estimated)| {
        let measured = phases.iter().filter_map(|phase| measured.get(phase)).max();
        let own = predicted.phases.iter();
        let own = own.filter(|p| estimated.contains(&p.name));
        Some(PhaseMemory {
            phase,
            predicted_bytes: own.map(|p| p.total_bytes).max().unwrap_or(0),
            measured_bytes: *measured?,
        })
    });
    groups.collect()
}
