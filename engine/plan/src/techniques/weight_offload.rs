//! Weights on the host: in phases that do not use them, or for good with visits of each segment to the device.

use crate::technique::prelude::*;
use crate::{ActivationPolicy, Order, ParamOffload};

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
        let mut all = vec![memory.clone()];
        if request.profile.is_unified() {
            return all;
        }
        let with = |param_offload| MemoryConfig { param_offload, ..memory.clone() };
        all.push(with(ParamOffload::Streamed));
        // a model that is alone is never idle
        if request.workload.reference || request.workload.critic.is_some() {
            all.push(with(ParamOffload::Idle));
        }
        all
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<Explanation> {
        let what = match used.memory.param_offload {
            ParamOffload::None => return None,
            ParamOffload::Streamed => "weights are streamed to the device segment by segment",
            ParamOffload::Idle => "weights are offloaded in phases that do not use them",
        };
        Some(used.explained(what, self.keys(), |c| {
            self.turn_off(&mut c.memory);
            c.memory.order = Order::MicroMajor;
        }))
    }

    fn examples(&self) -> &'static [&'static str] {
        &["param_offload: streamed"]
    }
}
