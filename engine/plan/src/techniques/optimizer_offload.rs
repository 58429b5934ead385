//! Optimizer state on the host: between updates, or for good with the update there.

use crate::OptimizerOffload as Offload;
use crate::estimate::{F32, MemoryUsage, ModelState, Update};
use crate::technique::prelude::*;
use firebrick_spec::Category;

impl ModelState<'_> {
    /// Moments, and masters if there are any.
    pub(crate) fn optimizer(&self, updates: bool) -> MemoryUsage {
        let Self { sizes, plan, parallel } = *self;
        let (optimizer, total) = (&plan.optimizer, sizes.trained());
        let on_host = match optimizer.home {
            Home::Host => (optimizer.offload_fraction * total as f64).round() as u64,
            Home::Device => 0,
        };
        let on_device = total - on_host;
        let moments = |numbers| parallel.optimizer(optimizer.moments.bytes(numbers));
        let bytes = |numbers| parallel.optimizer(F32 * numbers);
        // state that waits on the host visits the device one matrix at a time
        let visits = if updates && optimizer.idle == Home::Host { sizes.largest_trained.min(on_device) } else { 0 };
        let held = if sizes.is_half() {
            MemoryUsage::default()
                .on_host(Category::MasterWeights, bytes(on_host))
                .and(optimizer.idle, Category::MasterWeights, bytes(on_device) - bytes(visits))
                .on_device(Category::MasterWeights, bytes(visits))
        } else {
            // an f32 weight on the host is its own master, and so is the copy of a shard
            let ends = if plan.ends == Home::Host { sizes.trained_ends(sizes.ends()) } else { 0 };
            let streamed = ends + plan.on_host(|unit| sizes.trained_unit(unit));
            let masters = if parallel.shares() { 0 } else { on_host.saturating_sub(streamed) };
            MemoryUsage::default().on_host(Category::MasterWeights, bytes(masters))
        };
        held.on_host(Category::Moments, moments(on_host))
            .and(optimizer.idle, Category::Moments, moments(on_device) - moments(visits))
            .on_device(Category::Moments, moments(visits))
    }
}

pub(crate) struct OptimizerOffload;

impl Technique for OptimizerOffload {
    fn about(&self) -> About {
        About {
            keys: &["memory.optimizer_offload", "memory.offload_fraction"],
            kind: TechniqueKind::Chosen,
            examples: &["optimizer_offload: idle", "optimizer_offload: cpu"],
        }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        require(
            memory.offload_fraction >= 1.0 || memory.optimizer_offload == Offload::Cpu,
            "offload_fraction requires memory.optimizer_offload: cpu",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        let host_if = |offload| if memory.optimizer_offload == offload { Home::Host } else { Home::Device };
        plan.optimizer.home = host_if(Offload::Cpu);
        plan.optimizer.idle = host_if(Offload::Idle);
        plan.optimizer.offload_fraction = memory.offload_fraction;
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

    fn update_seconds(&self, update: &Update<'_>) -> f64 {
        let &Update { ctx, plan, on_host, on_device } = update;
        let (optimizer, bytes) = (&plan.optimizer, F32 as f64);
        let mut copies = on_host * bytes;
        if plan.grads != optimizer.home {
            copies += match plan.grads {
                Home::Host => on_device * bytes,
                Home::Device => on_host * bytes,
            };
        }
        if optimizer.idle == Home::Host {
            // in half precision the masters wait with the moments
            let masters = if ctx.sizes.is_half() { on_device * bytes } else { 0.0 };
            copies += 2.0 * (optimizer.moments.bytes(on_device as u64) as f64 + masters);
        }
        on_host * 36.0 / ctx.profile.host_bandwidth + ctx.copy(copies)
    }
}
