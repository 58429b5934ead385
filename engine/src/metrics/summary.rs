//! The summary of a run, with predicted beside measured bytes.

use super::phase::Phase;
use crate::plan::estimate::Estimate;
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

/// Phases of a run that are summed up together, by name.
const GROUPS: [(&str, &[Phase]); 6] = [
    ("rollout", &[Phase::Generate, Phase::GenerateBaseline, Phase::Validation]),
    ("score", &[Phase::OldLogProbs, Phase::ReferenceLogProbs]),
    ("update", &[Phase::UpdateActor]),
    ("values", &[Phase::Values]),
    ("update_critic", &[Phase::UpdateCritic]),
    ("warmup", &[Phase::WarmUp]),
];

/// Predicted beside measured bytes of the phases that ran, given the largest bytes of each.
pub fn phase_memory(predicted: &Estimate, measured: &BTreeMap<Phase, u64>) -> Vec<PhaseMemory> {
    let groups = GROUPS.iter().filter_map(|&(phase, phases)| {
        let measured = phases.iter().filter_map(|phase| measured.get(phase)).max();
        let is_predicted = |name| phases.iter().any(|phase| phase.estimates().contains(name));
        let estimates = predicted.phases.iter().filter(|estimate| is_predicted(&estimate.name));
        Some(PhaseMemory {
            phase,
            predicted_bytes: estimates.map(|estimate| estimate.total_bytes).max().unwrap_or(0),
            measured_bytes: *measured?,
        })
    });
    groups.collect()
}
