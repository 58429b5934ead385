//! State that data-parallel ranks shard (`ZeRO`, arXiv:1910.02054; FSDP).

use crate::technique::prelude::*;
use crate::{ActivationPolicy, Zero};

impl MemoryConfig {
    /// Sets another stage. Stage 3 frees gathered weights, which a kept graph would hold on to: it recomputes where it
    /// reshards.
    pub fn set_zero(&mut self, stage: Zero) {
        self.zero_stage = stage.number();
        self.gradient_checkpointing |= stage == Zero::Stage3 && self.reshard_after_forward;
    }

    /// Stage of `ZeRO`; the last one for a number above it, which [`check`](Self::check) refuses.
    pub fn zero(&self) -> Zero {
        Zero::STAGES[usize::from(self.zero_stage).min(Zero::STAGES.len() - 1)]
    }
}

pub(crate) struct Sharding;

impl Technique for Sharding {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.zero_stage", "memory.reshard_after_forward"]
    }

    fn is_parallelism(&self) -> bool {
        true
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        let stage = memory.zero_stage;
        require(
            usize::from(stage) < Zero::STAGES.len(),
            format_args!("zero_stage is {stage}; a stage from 0 to 3 was expected"),
        )?;
        let weights = memory.zero() == Zero::Stage3;
        require(memory.reshard_after_forward || weights, "reshard_after_forward: false requires memory.zero_stage: 3")?;
        require(
            !weights || !memory.reshard_after_forward || memory.gradient_checkpointing,
            "zero_stage: 3 frees a segment's gathered weights after it ran, and a kept graph would hold on to them: turn on \
             memory.gradient_checkpointing too, or set memory.reshard_after_forward to false",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.zero = memory.zero();
        plan.reshard_after_forward = memory.reshard_after_forward;
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        let frees = plan.zero == Zero::Stage3 && plan.reshard_after_forward;
        let kept = plan.segments.iter().find(|segment| frees && segment.keep == ActivationPolicy::Graph);
        require_of_plan(
            kept.is_none(),
            format_args!(
                "the segment of units {:?} keeps its graph, which holds on to its weights: gathered ones cannot be freed after the \
                 forward pass, so set `reshard_after_forward` to false or recompute all layers",
                kept.map(|segment| segment.units.clone()).unwrap_or_default()
            ),
        )
    }
}
