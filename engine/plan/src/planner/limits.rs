//! Limits of phases.

use crate::estimate::{Estimate, EstimatePhase, PhaseEstimate};
use crate::request::Request;
use std::collections::BTreeMap;

/// Bytes that phases may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PhaseLimits {
    pub device: u64,
    pub host: u64,
    /// Phases with limits below the device's.
    pub phases: BTreeMap<EstimatePhase, u64>,
}

impl PhaseLimits {
    pub fn hold(&self, phase: &PhaseEstimate) -> bool {
        let device = self.phases.get(&phase.name).map_or(self.device, |bytes| self.device.min(*bytes));
        phase.total_bytes <= device && phase.host_bytes <= self.host
    }

    /// True if the peaks of a whole estimate keep within them.
    pub fn hold_peaks(&self, estimate: &Estimate) -> bool {
        estimate.peak_bytes <= self.device && estimate.host_peak_bytes <= self.host
    }
}

impl Request {
    pub(super) fn limits(&self) -> PhaseLimits {
        PhaseLimits {
            device: self.allowed().unwrap_or(u64::MAX),
            host: self.host_budget.unwrap_or(u64::MAX),
            phases: self.phase_limits.clone(),
        }
    }
}
