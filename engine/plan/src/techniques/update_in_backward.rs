//! Update in the backward pass: each segment is updated as soon as its gradient is complete.

use crate::technique::prelude::*;
use crate::{OptimizerOffload, Zero};

pub(crate) struct UpdateInBackward;

impl Technique for UpdateInBackward {
    fn about(&self) -> About {
        About { keys: &["memory.step_in_backward"], kind: TechniqueKind::Chosen, examples: &[] }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        require(
            !memory.step_in_backward || memory.zero() == Zero::Off,
            "step_in_backward updates a unit before other ranks have its gradient, and zero_stage shards the update \
             over ranks; set one of them to its default",
        )?;
        require(
            !memory.step_in_backward || memory.optimizer_offload != OptimizerOffload::Idle,
            "step_in_backward uses the optimizer's state during the backward pass, so optimizer_offload: idle would \
             free nothing there; use optimizer_offload: cpu",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.optimizer.in_backward = memory.step_in_backward;
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.allows_step_in_backward() {
            and(memory, |m| m.step_in_backward = true)
        } else {
            vec![memory.clone()]
        }
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.step_in_backward.then_some("each segment is updated as soon as its gradient is complete")
    }
}
