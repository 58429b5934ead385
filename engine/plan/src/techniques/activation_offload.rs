//! Checkpointed activations on the host, in groups.

use crate::ActivationPolicy;
use crate::estimate::{MemoryUsage, Moment, TrainingPass, Transfers};
use crate::technique::prelude::*;
use firebrick_spec::Category;

pub(crate) struct ActivationOffload;

impl Technique for ActivationOffload {
    fn about(&self) -> About {
        About {
            keys: &["memory.activation_offload", "memory.activation_offload_group"],
            kind: TechniqueKind::Chosen,
            examples: &["activation_offload: true"],
        }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
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

    fn kept(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        if request.profile.is_unified() || !memory.gradient_checkpointing {
            return vec![memory.clone()];
        }
        and(memory, |m| m.activation_offload = true)
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.activation_offload.then_some("checkpointed activations are offloaded to the host")
    }

    fn hold(&self, at: &Moment<'_>, held: &mut MemoryUsage) {
        let (offloaded, prefetch) = (at.inputs[1], at.plan.prefetch as u64);
        // memory that copies on a stream of their own have read is free when an event says so, some work later
        let late = u64::from(prefetch > 0 && at.ctx.profile.overlaps_copies());
        // copies in flight are in both places
        let flight = (prefetch + 1 + late) * at.plan.offload_group as u64;
        *held = held
            .on_host(Category::KeptInputs, at.row * at.copies * offloaded)
            .on_device(Category::KeptInputs, at.row * offloaded.min(flight));
    }

    fn pass_seconds(&self, pass: &TrainingPass<'_>) -> Transfers {
        let bytes = 2.0 * pass.row * pass.totals.offloaded_inputs as f64;
        Transfers { beside: pass.ctx.copy(bytes), ..Transfers::default() }
    }
}
