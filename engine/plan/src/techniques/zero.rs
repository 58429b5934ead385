//! State that data-parallel ranks shard (`ZeRO`, arXiv:1910.02054; FSDP).

use crate::estimate::{Context, F32, MemoryUsage, ModelState, Moment, PeakUsage, Visit};
use crate::technique::prelude::*;
use crate::{ActivationPolicy, Segment, Zero};
use firebrick_spec::Category;

impl MemoryConfig {
    /// Sets another stage. Stage 3 frees gathered weights, which a kept graph would hold on to: it recomputes where it
    /// reshards.
    pub fn set_zero(&mut self, stage: Zero) {
        self.zero_stage = stage.number();
        self.gradient_checkpointing |= stage == Zero::Stage3 && self.reshard_after_forward;
    }

    /// Stage of `ZeRO`; the last one for a number above it, which [`check`](Self::check) refuses.
    pub fn zero(&self) -> Zero {
        Zero::STAGES[usize::from(self.zero_stage).min(Zero::STAGES.len() - 1)]
    }
}

impl ModelState<'_> {
    /// True if segments gather their weights from other devices.
    pub fn gathers(&self) -> bool {
        self.parallel.gathers() && self.plan.zero == Zero::Stage3
    }

    /// Bytes of weights that a segment gathers from other devices.
    pub fn gathered_by(&self, segment: &Segment) -> u64 {
        if self.gathers() { self.whole(self.segment(segment)) } else { 0 }
    }

    /// Bytes of gathered weights that are on the device with those of segment `index`: its own, or those of all segments
    /// where they stay until the backward pass.
    pub(crate) fn gathered(&self, index: usize) -> u64 {
        let segments = &self.plan.segments;
        self.whole(match (self.plan.reshard_after_forward, segments.get(index)) {
            (true, Some(segment)) => self.segment(segment),
            (true, None) => 0,
            (false, _) => segments.iter().map(|s| self.segment(s)).sum(),
        })
    }

    /// Bytes of weights that the `visit`-th of a pass gathers: embedding, segments, head, and in training the segments
    /// again, the last one first.
    fn visited(&self, visit: usize, trains: bool) -> u64 {
        let Self { sizes, plan, .. } = *self;
        let segments = plan.segments.len();
        let end = |numbers: u64| if sizes.is_tied() { 0 } else { sizes.width * numbers };
        match visit {
            0 => end(sizes.embedding),
            place if place <= segments => self.segment(&plan.segments[place - 1]),
            place if place == segments + 1 => end(sizes.projection),
            place if trains && plan.reshard_after_forward && place <= 2 * segments + 1 => {
                self.segment(&plan.segments[2 * segments + 1 - place])
            }
            _ => 0,
        }
    }

    /// Weights that are gathered ahead while the `visit`-th of a pass runs: those of the next visits, one of which is
    /// under way.
    pub fn gathered_ahead(&self, visit: usize, trains: bool) -> MemoryUsage {
        let home = self.plan.home_of_layers();
        // from GPU to GPU they are waited for
        let waited_for = self.parallel.nccl && home == Home::Device;
        if !self.gathers() || waited_for {
            return MemoryUsage::default();
        }
        let ahead = (visit + 1..=visit + self.plan.prefetch).map(|visit| self.visited(visit, trains));
        let (there, largest) = ahead.fold((0, 0), |(sum, most), bytes: u64| (sum + bytes, bytes.max(most)));
        self.parallel.gathering(largest, home).on_host(Category::Communication, self.whole(there - largest))
    }

    /// Buffers while a pass waits for the weights of the visit that gathers most.
    pub fn gathered_in_place(&self) -> MemoryUsage {
        if !self.gathers() {
            return MemoryUsage::default();
        }
        let visits = (0..=self.plan.segments.len() + 1).map(|visit| self.visited(visit, false));
        self.parallel.gathering(visits.max().unwrap_or(0), self.plan.home_of_layers())
    }
}

impl Context<'_> {
    /// Devices that shard state gather what they updated, unit by unit in their order. `held` gives their usage with
    /// some bytes of gradients, which are freed on the way.
    pub(crate) fn gathered_updates(&self, held: impl Fn(u64) -> MemoryUsage, peak: &mut PeakUsage) {
        if !self.parallel.shares() {
            return;
        }
        let plan = self.model();
        let (mut left, mut largest) = (self.sizes.trained(), 0);
        for (place, unit) in self.state(plan).trained_units().enumerate() {
            left -= unit;
            // a device that has its shards alone keeps them; tied ends are whole everywhere
            let gathers = plan.zero < Zero::Stage3 || place == 0 && self.sizes.is_tied();
            // later units that are no larger need less
            if !gathers || unit <= largest {
                continue;
            }
            largest = unit;
            let home = plan.home_of_layers();
            let gathered = self.parallel.gathering(self.sizes.width * unit, home);
            let held = held(self.parallel.optimizer(F32 * left));
            peak.record("gathering what devices updated", held + gathered);
        }
    }
}

pub(crate) struct Sharding;

impl Technique for Sharding {
    fn about(&self) -> About {
        About {
            keys: &["memory.zero_stage", "memory.reshard_after_forward"],
            kind: TechniqueKind::Parallelism,
            examples: &[],
        }
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        let weights = memory.zero() == Zero::Stage3;
        require(memory.reshard_after_forward || weights, "reshard_after_forward: false requires memory.zero_stage: 3")?;
        require(
            !weights || !memory.reshard_after_forward || memory.gradient_checkpointing,
            "zero_stage: 3 frees a segment's gathered weights after it ran, and a kept graph would hold on to them: turn on \
             memory.gradient_checkpointing too, or set memory.reshard_after_forward to false",
        )
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.zero = memory.zero();
        plan.reshard_after_forward = memory.reshard_after_forward;
    }

    fn hold(&self, at: &Moment<'_>, held: &mut MemoryUsage) {
        let state = at.state();
        if let Some(Visit { place, segment, .. }) = at.visit.filter(|_| state.gathers()) {
            *held = held.on_device(at.category, state.gathered(segment));
            *held += state.gathered_ahead(place, at.trains);
        }
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        let frees = plan.zero == Zero::Stage3 && plan.reshard_after_forward;
        let kept = plan.segments.iter().find(|segment| frees && segment.keep == ActivationPolicy::Graph);
        require_of_plan(
            kept.is_none(),
            format_args!(
                "the segment of units {:?} keeps its graph, which holds on to its weights: gathered ones cannot be freed after the \
                 forward pass, so set `reshard_after_forward` to false or recompute all layers",
                kept.map(|segment| segment.units.clone()).unwrap_or_default()
            ),
        )
    }
}
