//! Stages of a pipeline: each one's part of a plan. Without stages one device has all.
//!
//! A stage is a smaller model to the rest of an estimate: its sizes are those of its layers, and of the ends that are
//! there. It samples from the whole model all the same.

use crate::estimate::{Context, Estimate, ModelSizes, Parallel, Workload};
use crate::{Plan, Segment};
use firebrick_arch::PipelineStage;
use firebrick_spec::DeviceProfile;
use std::ops::Range;

/// The parameters of every stage, the first one first; of one device that has all if there are no stages.
#[derive(Clone, Debug)]
pub(crate) struct Stages(Vec<ModelSizes>);

impl Stages {
    pub fn new(workload: &Workload, parallel: &Parallel) -> Self {
        let count = parallel.pipeline as usize;
        if count <= 1 {
            return Self(vec![ModelSizes::new(workload, parallel, None)]);
        }
        let stages = (0..count).map(|stage| Some(PipelineStage::new(stage, count)));
        Self(stages.map(|stage| ModelSizes::new(workload, parallel, stage)).collect())
    }

    /// Bytes and seconds of a plan on the devices of the stage that binds in each phase.
    pub fn estimate(&self, workload: &Workload, plan: &Plan, profile: &DeviceProfile, parallel: &Parallel) -> Estimate {
        let plans = self.distinct(workload, plan);
        Estimate::slowest_of(plans.contexts(workload, profile, parallel).map(|ctx| ctx.estimate()))
    }

    /// A plan as every stage has it.
    pub fn plans(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let plans = self.0.iter().map(|sizes| (sizes, sizes.plan(workload, plan)));
        StagePlans(plans.collect())
    }

    /// The plan of each distinct stage: of those that differ in nothing but their place, the first, which has most
    /// micro-batches under way.
    pub fn distinct(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let mut distinct: Vec<(&ModelSizes, Plan)> = Vec::new();
        for (sizes, plan) in self.plans(workload, plan).0 {
            let is_alike = |(other, theirs): &(&ModelSizes, Plan)| {
                sizes.is_alike(other) && relative_segments(theirs).eq(relative_segments(&plan))
            };
            if !distinct.iter().any(is_alike) {
                distinct.push((sizes, plan));
            }
        }
        StagePlans(distinct)
    }
}

/// The segments of all models, from each one's first unit on.
fn relative_segments(plan: &Plan) -> impl Iterator<Item = Segment> {
    plan.models.values().flat_map(|model| {
        let first = model.segments.first().map_or(0, |segment| segment.units.start);
        let from_first = move |units: &Range<usize>| units.start - first..units.end - first;
        model.segments.iter().map(move |segment| Segment { units: from_first(&segment.units), ..segment.clone() })
    })
}

/// A plan as stages have it.
#[derive(Clone, Debug)]
pub(crate) struct StagePlans<'a>(Vec<(&'a ModelSizes, Plan)>);

impl StagePlans<'_> {
    /// The plan of the first.
    pub fn first(&self) -> &Plan {
        &self.0[0].1
    }

    /// Changes the plan of each.
    pub fn change(&mut self, change: impl Fn(&mut Plan)) {
        self.0.iter_mut().for_each(|(_, plan)| change(plan));
    }

    /// The context of each stage.
    pub fn contexts<'p>(
        &'p self,
        workload: &'p Workload,
        profile: &'p DeviceProfile,
        parallel: &'p Parallel,
    ) -> impl Iterator<Item = Context<'p>> {
        self.0.iter().map(move |(sizes, plan)| Context::new(workload, plan, profile, parallel, sizes))
    }
}

#[cfg(test)]
mod tests;
