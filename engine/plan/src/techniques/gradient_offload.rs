//! Gradients accumulated on the host.

use crate::technique::prelude::*;

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

    fn explain(&self, used: &Candidate, _: &Request) -> Option<Explanation> {
        let undo = |c: &mut Candidate| self.turn_off(&mut c.memory);
        used.memory
            .grad_offload
            .then(|| used.explained("gradients are offloaded as they are complete", self.keys(), undo))
    }

    fn examples(&self) -> &'static [&'static str] {
        &["grad_offload: true"]
    }
}
