//! Gradients accumulated on the host.

use crate::estimate::Context;
use crate::technique::prelude::*;

/// Seconds to copy `bytes` of gradients to the host and add them there. The computation waits for them: all but the last
/// `prefetch` matrices.
pub(crate) fn seconds(ctx: &Context<'_>, bytes: f64) -> f64 {
    match ctx.model().grads {
        Home::Host => ctx.copy(bytes) + 3.0 * bytes / ctx.profile.host_bandwidth,
        Home::Device => 0.0,
    }
}

pub(crate) struct GradientOffload;

impl Technique for GradientOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.grad_offload"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.grads = if memory.grad_offload { Home::Host } else { Home::Device };
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.grad_offload = false;
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() { vec![memory.clone()] } else { and(memory, |m| m.grad_offload = true) }
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.grad_offload.then_some("gradients are offloaded as they are complete")
    }

    fn examples(&self) -> &'static [&'static str] {
        &["grad_offload: true"]
    }
}
