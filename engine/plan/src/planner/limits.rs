//! Limits of phases.

use crate::estimate::{Estimate, EstimatePhase, PhaseEstimate};
use crate::request::Request;

/// Bytes that phases may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PhaseLimits {
    pub device: u64,
    pub host: u64,
    /// A phase with a limit below the device's.
    pub phase: Option<(EstimatePhase, u64)>,
}

impl PhaseLimits {
    pub fn hold(&self, phase: &PhaseEstimate) -> bool {
        let device = match self.phase {
            Some((name, bytes)) if name == phase.name => self.device.min(bytes),
            _ => self.device,
        };
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
            phase: None,
        }
    }
}
