//! Stages of a pipeline: the parameters that each has of every model, and its part of a plan. Without stages one device has all.
//!
//! A stage is a smaller model to the rest of an estimate: its sizes are those of its layers, and of the ends that are there. It samples,
//! loads and saves whole models all the same.

use super::context::Context;
use super::parallel::Parallel;
use super::sizes::Sizes;
use super::unit_messages::UnitMessages;
use super::workload::Workload;
use crate::segmentation::body_of;
use crate::{Plan, Role, Segment};
use firebrick_spec::{DeviceProfile, PipelineStage};

/// The parameters of a run's models, on all devices or on those of a stage: the same under every plan, so that a search counts them once.
#[derive(Clone, Debug)]
pub(crate) struct ModelSizes {
    /// The stage, where layers are divided.
    pub stage: Option<PipelineStage>,
    pub policy: Sizes,
    pub critic: Option<Sizes>,
    /// All of the policy and the critic, whatever the stage.
    pub whole_policy: Sizes,
    whole_critic: Option<Sizes>,
    pub rewards: Vec<Sizes>,
    /// Messages about the policy's units and the critic's.
    pub units: [UnitMessages; 2],
    pub sampling: Parallel,
    pub warm_up: Option<Workload>,
}

impl ModelSizes {
    fn of(workload: &Workload, parallel: &Parallel, stage: Option<PipelineStage>) -> Self {
        let rewards = workload.rewards.iter();
        let critic = workload.critic_arch();
        let lora = workload.lora.as_ref();
        let policy = Some((&workload.arch, lora));
        Self {
            stage,
            units: [policy, critic.map(|arch| (arch, None))].map(|model| {
                model.map_or_else(UnitMessages::default, |(arch, lora)| {
                    let shared = (parallel.replicas(), parallel.tensor);
                    UnitMessages::of(arch, lora, shared).of_stage(arch, stage)
                })
            }),
            sampling: parallel.sampling(),
            policy: Sizes::of_stage(&workload.arch, lora, stage),
            critic: critic.map(|arch| Sizes::of_stage(arch, None, stage)),
            whole_policy: Sizes::of(&workload.arch, lora),
            whole_critic: critic.map(|arch| Sizes::of(arch, None)),
            rewards: rewards.map(|own| Sizes::of(&own.arch, None)).collect(),
            warm_up: workload.warming_up(),
        }
    }

    /// The models of a plan that are trained, whole.
    pub fn whole(&self, plan: &Plan) -> Vec<(Role, Sizes)> {
        let critic = self.whole_critic.filter(|_| plan.critic().is_some());
        let policy = std::iter::once((Role::Policy, self.whole_policy));
        policy
            .chain(critic.map(|own| (Role::Critic, own)))
            .collect()
    }

    /// Whether another stage between the first and the last has as much of all models.
    fn is_like(&self, other: &Self) -> bool {
        let between = |own: &Self| {
            own.stage
                .is_some_and(|stage| !stage.is_first() && !stage.is_last())
        };
        let alike = (self.policy, self.critic) == (other.policy, other.critic);
        between(self) && between(other) && alike
    }

    fn plan(&self, workload: &Workload, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        let Some(stage) = self.stage else {
            return plan;
        };
        let critic = workload.critic_arch();
        plan.models = plan
            .models
            .into_iter()
            .map(|(role, model)| {
                let own = critic.filter(|_| role == Role::Critic);
                let part = body_of(own.unwrap_or(&workload.arch), stage);
                (role, model.within(&part))
            })
            .collect();
        plan
    }
}

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
        Self(
            stages
                .map(|stage| ModelSizes::of(workload, parallel, stage))
                .collect(),
        )
    }

    /// A plan as every stage has it.
    pub fn plans(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let plans = self.0.iter().map(|own| (own, own.plan(workload, plan)));
        StagePlans(plans.collect())
    }

    /// The same of stages that are unlike: of those that differ in nothing but their place, the first, which has most micro-batches under
    /// way.
    pub fn unlike(&self, workload: &Workload, plan: &Plan) -> StagePlans<'_> {
        let mut found: Vec<(&ModelSizes, Plan)> = Vec::new();
        for (own, plan) in self.plans(workload, plan).0 {
            let is_like = |(other, theirs): &(&ModelSizes, Plan)| {
                own.is_like(other) && cuts(theirs).eq(cuts(&plan))
            };
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
        model.segments.iter().map(move |own| Segment {
            units: own.units.start - first..own.units.end - first,
            ..own.clone()
        })
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
