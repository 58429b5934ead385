//! Summary of a run, with predicted and measured bytes.

use super::phase::Phase;
use crate::plan::estimate::Estimate;
use serde::Serialize;
use std::collections::BTreeMap;

/// `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Finished steps.
    pub steps: u64,
    /// Steps of the whole run: more than `steps` if the session was stopped.
    pub max_steps: u64,
    /// Seconds of training, over all sessions of the run.
    pub seconds: f64,
    /// Sampled and trained tokens per second.
    pub tokens_per_second: f64,
    /// First value of each validation metric.
    pub first: BTreeMap<String, f64>,
    /// Last value of each validation metric.
    pub last: BTreeMap<String, f64>,
    /// Predicted peak of the current plan.
    pub predicted_peak_bytes: Option<u64>,
    /// Largest bytes measured on the device (on the CPU: the counted heap).
    pub measured_peak_bytes: u64,
    /// Largest bytes measured on each of several ranks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rank_peak_bytes: Vec<u64>,
    /// Predicted and measured bytes by phase.
    pub memory: Vec<PhaseMemory>,
    /// Replans after memory ran out, in this session.
    pub replans: u64,
    /// Peak resident set of the process, if the system reports it.
    pub peak_resident_bytes: Option<u64>,
    /// The device, as in the configuration.
    pub device: String,
    /// Float type of parameters and activations.
    pub precision: &'static str,
    /// Optimizer steps skipped for a non-finite gradient norm.
    pub skipped_steps: u64,
}

/// Predicted and measured bytes of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseMemory {
    /// `rollout`, `score` or `update`; with a critic also `values` and `update_critic`, with a warm-up `warmup`.
    pub phase: &'static str,
    /// Predicted bytes.
    pub predicted_bytes: u64,
    /// Bytes measured in this session: on the CPU the phase's peak, elsewhere the reserved bytes at its end.
    pub measured_bytes: u64,
}

/// Groups of phases in the summary, by name.
const GROUPS: [(&str, &[Phase]); 6] = [
    ("rollout", &[Phase::Generate, Phase::GenerateBaseline, Phase::Validation]),
    ("score", &[Phase::OldLogProbs, Phase::ReferenceLogProbs]),
    ("update", &[Phase::UpdateActor]),
    ("values", &[Phase::Values]),
    ("update_critic", &[Phase::UpdateCritic]),
    ("warmup", &[Phase::WarmUp]),
];

/// Predicted and measured bytes of the phases that ran, given the largest bytes of each.
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
