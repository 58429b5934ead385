//! Optimizer moments in fewer bits (8-bit blocks: arXiv:2110.02861).

use crate::MomentKind;
use crate::estimate::Update;
use crate::technique::prelude::*;

/// Elements that share a scale in 8-bit moments.
const BLOCK: u64 = 256;

impl MomentKind {
    /// All formats, the most bits first.
    const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::Block8];

    /// Bytes of both moments of `parameters` parameters.
    pub fn bytes(self, parameters: u64) -> u64 {
        match self {
            Self::F32 => 8 * parameters,
            Self::Bf16 => 4 * parameters,
            Self::Block8 => 2 * (parameters + 4 * parameters.div_ceil(BLOCK)),
        }
    }

    /// Temporaries of an update, in tensors of the slice that is updated: a kernel updates f32 and bf16 in place.
    pub(crate) fn temporaries(self, kernel: bool) -> u64 {
        match (self, kernel) {
            (Self::F32 | Self::Bf16, true) => 0,
            (Self::F32, false) | (Self::Block8, true) => 2,
            (Self::Bf16, false) => 4,
            (Self::Block8, false) => 6,
        }
    }

    /// Bytes per parameter that an update moves: weight and gradient, moments, and passes over temporaries.
    pub(crate) fn traffic(self) -> f64 {
        match self {
            Self::F32 => 60.0,
            Self::Bf16 => 72.0,
            Self::Block8 => 120.0,
        }
    }

    /// Bytes per parameter that an update in tensor operations moves: eleven passes over one tensor that read and write
    /// it, four over two tensors, and conversions.
    pub(crate) fn traffic_of_operations(self) -> f64 {
        let conversions = match self {
            Self::F32 => 0.0,
            Self::Bf16 => 24.0,
            Self::Block8 => 64.0,
        };
        11.0 * 8.0 + 4.0 * 12.0 + conversions
    }

    /// Factor of a step's seconds in the search: moments of fewer bits change results a little, so they are taken only
    /// where exact ways to save as much cost more than that.
    pub fn penalty(self) -> f64 {
        match self {
            Self::F32 => 1.0,
            Self::Bf16 => 1.25,
            Self::Block8 => 1.5,
        }
    }
}

pub(crate) struct OptimizerPrecision;

impl Technique for OptimizerPrecision {
    fn about(&self) -> About {
        About { keys: &["memory.moments"], kind: TechniqueKind::Set, examples: &["moments: block8"] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.optimizer.moments = memory.moments;
    }

    fn placements(&self, memory: &MemoryConfig, _: &Request) -> Vec<MemoryConfig> {
        // never more bits than the settings have
        let formats = MomentKind::ALL.into_iter().skip_while(|&moments| moments != memory.moments);
        formats.map(|moments| MemoryConfig { moments, ..memory.clone() }).collect()
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        (used.memory.moments != request.memory.moments).then_some("moments are stored in a smaller type")
    }

    fn update_seconds(&self, update: &Update<'_>) -> f64 {
        let &Update { ctx, plan, on_device, .. } = update;
        let moments = plan.optimizer.moments;
        let moved = if ctx.rates().is_some() { moments.traffic_of_operations() } else { moments.traffic() };
        on_device * moved / ctx.profile.memory_bandwidth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_take_eight_four_and_about_two_bytes_a_parameter() {
        assert_eq!(MomentKind::F32.bytes(1024), 8192);
        assert_eq!(MomentKind::Bf16.bytes(1024), 4096);
        assert_eq!(MomentKind::Block8.bytes(1024), 2 * (1024 + 16));
    }
}
