//! Stages of a pipeline: each one's part of a plan. Without stages one device has all.
//!
//! A stage is a smaller model to the rest of an estimate: its sizes are those of its layers, and of the ends that are
//! there. It samples from the whole model all the same.

use crate::estimate::{Context, Estimate, ModelSizes, Parallel, Workload};
use crate::{Plan, Segment};
use firebrick_arch::PipelineStage;
use firebrick_spec::DeviceProfile;

/// The parameters of every stage, the first one first; of one device that has all where there are no stages.
#[derive(Clone, Debug)]
pub(crate) struct Stages(Vec<ModelSizes>);

impl Stages {
    pub fn of(workload: &Workload, parallel: &Parallel) -> Self {
        let count = parallel.pipeline as usize;
        if count <= 1 {
            return Self(vec![ModelSizes::of(workload, parallel, None)]);
        }
        let stages = (0..count).map(|stage| Some(PipelineStage::new(stage, count)));
        Self(stages.map(|stage| ModelSizes::of(workload, parallel, stage)).collect())
    }

    /// Bytes and seconds of a plan on the devices of the stage that binds in each phase.
    pub fn estimate(&self, workload: &Workload, plan: &Plan, profile: &DeviceProfile, parallel: &Parallel) -> Estimate {
        let plans = self.unlike(workload, plan);
        let each = plans.contexts(workload, profile, parallel);
        Estimate::of_stages(each.map(|ctx| ctx.estimate()))
    }

    /// A plan as every stage has it.
    pub fn plans(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let plans = self.0.iter().map(|own| (own, own.plan(workload, plan)));
        StagePlans(plans.collect())
    }

    /// The same of stages that are unlike: of those that differ in nothing but their place, the first, which has most
    /// micro-batches under way.
    pub fn unlike(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let mut found: Vec<(&ModelSizes, Plan)> = Vec::new();
        for (own, plan) in self.plans(workload, plan).0 {
            let is_like = |(other, theirs): &(&ModelSizes, Plan)| own.is_like(other) && cuts(theirs).eq(cuts(&plan));
            if !found.iter().any(is_like) {
                found.push((own, plan));
            }
        }
        StagePlans(found)
    }
}

/// The segments of all models, from each one's first unit on.
fn cuts(plan: &Plan) -> impl Iterator<Item = Segment> {
    plan.models.values().flat_map(|model| {
        let first = model.segments.first().map_or(0, |own| own.units.start);
        model
            .segments
            .iter()
            .map(move |own| Segment { units: own.units.start - first..own.units.end - first, ..own.clone() })
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

    /// What an estimate looks at, of each stage.
    pub fn contexts<'p>(
        &'p self,
        workload: &'p Workload,
        profile: &'p DeviceProfile,
        parallel: &'p Parallel,
    ) -> impl Iterator<Item = Context<'p>> {
        let each = self.0.iter();
        each.map(move |(sizes, plan)| Context::new(workload, plan, profile, parallel, sizes))
    }
}

#[cfg(test)]
mod tests;
