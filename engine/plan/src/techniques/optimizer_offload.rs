//! Optimizer state on the host: between updates, or for good with the update there.

use crate::OptimizerOffload as Offload;
use crate::technique::prelude::*;

pub(crate) struct OptimizerOffload;

impl Technique for OptimizerOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.optimizer_offload", "memory.offload_fraction"]
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        let fraction = memory.offload_fraction;
        require(
            (0.0..=1.0).contains(&fraction),
            format_args!("offload_fraction is {fraction}; a share between 0 and 1 was expected"),
        )?;
        require(
            fraction >= 1.0 || memory.optimizer_offload == Offload::Cpu,
            "offload_fraction requires memory.optimizer_offload: cpu",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        let host_if = |offload| if memory.optimizer_offload == offload { Home::Host } else { Home::Device };
        plan.optimizer.home = host_if(Offload::Cpu);
        plan.optimizer.idle = host_if(Offload::Idle);
        plan.optimizer.offload_fraction = memory.offload_fraction;
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.optimizer_offload = Offload::None;
        memory.offload_fraction = 1.0;
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        let mut settings = vec![memory.clone()];
        if request.profile.is_unified() {
            return settings;
        }
        let with = |optimizer_offload, offload_fraction| MemoryConfig {
            optimizer_offload,
            offload_fraction,
            ..memory.clone()
        };
        settings.extend([with(Offload::Cpu, 0.5), with(Offload::Cpu, 1.0)]);
        if !memory.step_in_backward {
            settings.push(with(Offload::Idle, 1.0));
        }
        settings
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        match used.memory.optimizer_offload {
            Offload::None => None,
            Offload::Cpu => Some("the host keeps the moments and computes the update"),
            Offload::Idle => Some("moments are offloaded to the host between updates"),
        }
    }

    fn used_keys(&self, used: &Candidate) -> Vec<&'static str> {
        let count = if used.memory.offload_fraction < 1.0 { 2 } else { 1 };
        self.keys()[..count].to_vec()
    }

    fn examples(&self) -> &'static [&'static str] {
        &["optimizer_offload: idle", "optimizer_offload: cpu"]
    }
}
