//! Weights on the host: in phases that do not use them, or for good with visits of each segment to the device.

use crate::estimate::{Context, Sizes};
use crate::technique::prelude::*;
use crate::{ActivationPolicy, Order, ParamOffload};

/// Seconds to copy a model that waits on the host to the device and back, for a phase.
pub(crate) fn visit_seconds(ctx: &Context<'_>, plan: &ModelPlan, sizes: &Sizes) -> f64 {
    match plan.idle {
        Home::Host => ctx.copy((2 * sizes.bytes()) as f64),
        Home::Device => 0.0,
    }
}

pub(crate) struct WeightOffload;

impl Technique for WeightOffload {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.param_offload"]
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        require(
            memory.param_offload != ParamOffload::Streamed || memory.gradient_checkpointing,
            "param_offload: streamed releases a segment's weights after it ran, and a kept graph would hold on to them: \
             turn on memory.gradient_checkpointing too",
        )
    }

    fn apply(&self, memory: &MemoryConfig, arch: &Arch, plan: &mut ModelPlan) {
        match memory.param_offload {
            ParamOffload::None => {}
            ParamOffload::Idle => plan.idle = Home::Host,
            ParamOffload::Streamed => {
                for segment in &mut plan.segments {
                    segment.weights = Home::Host;
                }
                // a tied embedding stays: both ends use it
                if !arch.tied {
                    plan.ends = Home::Host;
                }
            }
        }
    }

    fn check_plan(&self, plan: &ModelPlan, arch: &Arch) -> Result<()> {
        for segment in &plan.segments {
            require_of_plan(
                segment.keep != ActivationPolicy::Graph || segment.weights == Home::Device,
                format_args!(
                    "the segment of units {:?} keeps its graph, which holds on to its weights: they cannot be streamed",
                    segment.units
                ),
            )?;
        }
        require_of_plan(
            !arch.tied || plan.ends == Home::Device,
            "embedding and head share one matrix here, which stays on the device: `ends` should be device",
        )
    }

    fn turn_off(&self, memory: &mut MemoryConfig) {
        memory.param_offload = ParamOffload::None;
    }

    fn placements(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        let mut settings = vec![memory.clone()];
        if request.profile.is_unified() {
            return settings;
        }
        let with = |param_offload| MemoryConfig { param_offload, ..memory.clone() };
        settings.push(with(ParamOffload::Streamed));
        // a model that is alone is never idle
        if request.workload.reference || request.workload.critic.is_some() {
            settings.push(with(ParamOffload::Idle));
        }
        settings
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        match used.memory.param_offload {
            ParamOffload::None => None,
            ParamOffload::Streamed => Some("weights are streamed to the device segment by segment"),
            ParamOffload::Idle => Some("weights are offloaded in phases that do not use them"),
        }
    }

    fn undo(&self, used: &mut Candidate, _: &Request) {
        self.turn_off(&mut used.memory);
        used.memory.order = Order::MicroMajor;
    }

    fn examples(&self) -> &'static [&'static str] {
        &["param_offload: streamed"]
    }
}
