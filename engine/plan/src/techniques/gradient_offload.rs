//! Gradients accumulated on the host.

use crate::request::{Candidate, Request};
use crate::technique::{Explanation, Technique, and};
use crate::{MemoryConfig, ModelPlan, Result};
use firebrick_arch::Arch;
use firebrick_spec::Home;

pub(crate) struct GradientOffload;

impl Technique for GradientOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.grad_offload"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) -> Result<()> {
        plan.grads = if memory.grad_offload { Home::Host } else { Home::Device };
        Ok(())
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.grad_offload = false;
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() { vec![memory.clone()] } else { and(memory, |m| m.grad_offload = true) }
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<Explanation> {
        if !used.memory.grad_offload {
            return None;
        }
        let what = "gradients are offloaded as they are complete";
        used.explained(what, self.keys(), |c| self.turn_off(&mut c.memory))
    }

    fn examples(&self) -> &'static [&'static str] {
        &["grad_offload: true"]
    }
}
