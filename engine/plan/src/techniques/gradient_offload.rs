//! Gradients accumulated on the host.

use crate::estimate::{F32, MemoryUsage, Moment, TrainingPass, Transfers};
use crate::technique::prelude::*;
use firebrick_spec::Category;

pub(crate) struct GradientOffload;

impl Technique for GradientOffload {
    fn about(&self) -> About {
        About { keys: &["memory.grad_offload"], kind: TechniqueKind::Chosen, examples: &["grad_offload: true"] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.grads = if memory.grad_offload { Home::Host } else { Home::Device };
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() { vec![memory.clone()] } else { and(memory, |m| m.grad_offload = true) }
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.grad_offload.then_some("gradients are offloaded as they are complete")
    }

    /// A matrix on its way, and those ahead of it.
    fn hold(&self, at: &Moment<'_>, held: &mut MemoryUsage) {
        if at.plan.grads == Home::Host {
            let numbers = (at.plan.prefetch as u64 + 1) * at.ctx.sizes.largest_trained.min(at.fresh);
            let flight = at.ctx.parallel.replicated().gradients(F32 * numbers);
            *held = held.on_host(Category::Buffers, flight);
        }
    }

    /// Gradients are copied and added on the host. The computation waits for them: all but the last `prefetch` matrices.
    fn pass_seconds(&self, pass: &TrainingPass<'_>) -> Transfers {
        let (ctx, bytes) = (pass.ctx, pass.gradients);
        let waited = match ctx.model().grads {
            Home::Host => ctx.copy(bytes) + 3.0 * bytes / ctx.profile.host_bandwidth,
            Home::Device => 0.0,
        };
        Transfers { waited, ..Transfers::default() }
    }
}
