//! Checkpointed activations on the host, in groups.

use crate::ActivationPolicy;
use crate::technique::prelude::*;

pub(crate) struct ActivationOffload;

impl Technique for ActivationOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.activation_offload", "memory.activation_offload_group"]
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        at_least_one("activation_offload_group", memory.activation_offload_group)?;
        require(
            !memory.activation_offload || memory.gradient_checkpointing,
            "activation_offload moves the inputs that gradient checkpointing keeps, and a whole graph cannot leave the \
             device: turn on memory.gradient_checkpointing too",
        )?;
        require(
            memory.activation_offload_group == 1 || memory.activation_offload,
            "activation_offload_group requires memory.activation_offload: true",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.offload_group = memory.activation_offload_group;
        for segment in plan.segments.iter_mut().filter(|_| memory.activation_offload) {
            if let ActivationPolicy::Input(home) = &mut segment.keep {
                *home = Home::Host;
            }
        }
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        at_least_one_in_plan("offload_group", plan.offload_group)
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.activation_offload = false;
        memory.activation_offload_group = 1;
    }

    fn kept(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() || !memory.gradient_checkpointing {
            return vec![memory.clone()];
        }
        and(memory, |m| m.activation_offload = true)
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.activation_offload.then_some("checkpointed activations are offloaded to the host")
    }

    fn examples(&self) -> &'static [&'static str] {
        &["activation_offload: true"]
    }
}
