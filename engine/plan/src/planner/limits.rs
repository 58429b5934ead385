//! What a phase may take.

use crate::estimate::{EstimatePhase, PhaseEstimate};

/// Bytes that a phase may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PhaseLimits {
    pub device: u64,
    pub host: u64,
    /// A phase with a limit of its own.
    pub phase: Option<(EstimatePhase, u64)>,
}

impl PhaseLimits {
    pub fn hold(&self, phase: &PhaseEstimate) -> bool {
        let own = match self.phase {
            Some((name, bytes)) if name == phase.name => self.device.min(bytes),
            _ => self.device,
        };
        phase.total_bytes <= own && phase.host_bytes <= self.host
    }
}
