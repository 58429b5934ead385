//! Weights on the host: in phases that do not use them, or for good with visits of each segment to the device.

use crate::estimate::{Context, MemoryUsage, ModelState, Moment, Sizes, TrainingPass, Transfers, Visit};
use crate::technique::prelude::*;
use crate::{ActivationPolicy, Order, ParamOffload};

impl ModelPlan {
    /// Bytes of weights that live on the host, embedding and head apart.
    pub(crate) fn streamed(&self, sizes: &Sizes) -> u64 {
        self.on_host(|unit| sizes.unit_bytes(unit))
    }

    /// Sum over the units whose weights live on the host.
    pub(crate) fn on_host(&self, count: impl Fn(usize) -> u64) -> u64 {
        self.segments.iter().filter(|s| s.weights == Home::Host).flat_map(|s| s.units.clone()).map(count).sum()
    }

    /// Location of the layers' weights: the device if all of them are there.
    pub(crate) fn home_of_layers(&self) -> Home {
        let resident = self.segments.iter().all(|s| s.weights == Home::Device);
        if resident { Home::Device } else { Home::Host }
    }
}

impl ModelState<'_> {
    /// Bytes of streamed weights that are on the device for segment `index`, with those of `ahead` others: in the backward
    /// pass the next ones to be fetched stand before it.
    pub(crate) fn streamed(&self, index: usize, ahead: usize) -> u64 {
        let segments = &self.plan.segments;
        let around = index.saturating_sub(ahead)..=index.min(segments.len().saturating_sub(1));
        let streamed = segments[around].iter().filter(|s| s.weights == Home::Host);
        self.parallel.weights(streamed.map(|s| self.segment(s)).sum())
    }
}

impl Context<'_> {
    /// Bytes of weights that a device streams in one pass over a model, given those of its body.
    pub(crate) fn streamed(&self, plan: &ModelPlan, body: u64) -> f64 {
        let ends = match plan.ends {
            Home::Host => self.sizes.end_bytes(),
            Home::Device => 0,
        };
        self.parallel.weights(body + ends) as f64
    }
}

/// Seconds to copy a model that waits on the host to the device and back, for a phase.
pub(crate) fn visit_seconds(ctx: &Context<'_>, plan: &ModelPlan, sizes: &Sizes) -> f64 {
    match plan.idle {
        Home::Host => ctx.copy((2 * sizes.bytes()) as f64),
        Home::Device => 0.0,
    }
}

pub(crate) struct WeightOffload;

impl Technique for WeightOffload {
    fn about(&self) -> About {
        About { keys: &["memory.param_offload"], kind: TechniqueKind::Chosen, examples: &["param_offload: streamed"] }
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

    fn hold(&self, at: &Moment<'_>, held: &mut MemoryUsage) {
        let state = at.state();
        if let Some(Visit { segment, ahead, .. }) = at.visit.filter(|_| !state.gathers()) {
            *held = held.on_device(at.category, state.streamed(segment, ahead));
        }
    }

    fn pass_seconds(&self, pass: &TrainingPass<'_>) -> Transfers {
        let fetched = 2.0 * pass.ctx.streamed(pass.ctx.model(), pass.totals.streamed);
        Transfers { beside: pass.ctx.copy(fetched) / pass.per_fetch, ..Transfers::default() }
    }
}
