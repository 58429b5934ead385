//! Parameters of every model of a run on all devices, or on the devices of a stage.

use crate::estimate::bytes::sizes::{Sizes, sublayers};
use crate::estimate::{Parallel, UnitMessages, Workload};
use crate::plan::body_of;
use crate::{Plan, Role};
use firebrick_arch::arch::QkNorm;
use firebrick_arch::parameters::{Slot, UnitKind, unit_specs};
use firebrick_arch::{Arch, PipelineStage};

/// The parameters of a run's models, on all devices or on those of a stage: the same under every plan, so that a search
/// counts them once.
#[derive(Clone, Debug)]
pub(crate) struct ModelSizes {
    /// The stage, where layers are divided.
    pub stage: Option<PipelineStage>,
    pub policy: Sizes,
    pub critic: Option<Sizes>,
    /// The whole policy.
    pub whole_policy: Sizes,
    pub rewards: Vec<Sizes>,
    /// Messages about the units of each reward model.
    pub reward_units: Vec<UnitMessages>,
    /// Numbers of the policy's matrices that a GPU joins where sampling copies them.
    pub joined: u64,
    /// Messages about the policy's units and the critic's.
    pub units: [UnitMessages; 2],
    pub sampling: Parallel,
    /// The devices as they work for the critic.
    pub valued: Parallel,
    pub warm_up: Option<Workload>,
}

impl ModelSizes {
    /// Those of a stage, if there is one.
    pub fn new(workload: &Workload, parallel: &Parallel, stage: Option<PipelineStage>) -> Self {
        let rewards = workload.rewards.iter();
        let shared = (parallel.replicas(), parallel.tensor);
        let reward_units = rewards.clone().map(|reward| UnitMessages::new(&reward.arch, None, shared));
        let critic = workload.critic_arch();
        let lora = workload.lora.as_ref();
        let policy = Some((&workload.arch, lora));
        Self {
            stage,
            units: [policy, critic.map(|arch| (arch, None))].map(|model| {
                model.map_or_else(UnitMessages::default, |(arch, lora)| {
                    UnitMessages::new(arch, lora, shared).for_stage(arch, stage)
                })
            }),
            sampling: parallel.sampling(),
            valued: parallel.critic(),
            policy: Sizes::for_stage(&workload.arch, lora, stage),
            critic: critic.map(|arch| Sizes::for_stage(arch, None, stage)),
            whole_policy: Sizes::new(&workload.arch, lora),
            reward_units: reward_units.collect(),
            rewards: rewards.map(|reward| Sizes::new(&reward.arch, None)).collect(),
            joined: joined(&workload.arch),
            warm_up: workload.warming_up(),
        }
    }

    /// True if another stage between the first and the last has as much of all models.
    pub fn is_alike(&self, other: &Self) -> bool {
        let between = |sizes: &Self| sizes.stage.is_some_and(|stage| !stage.is_first() && !stage.is_last());
        let alike = (self.policy, self.critic) == (other.policy, other.critic);
        between(self) && between(other) && alike
    }

    /// The part of a plan on these devices.
    pub fn plan(&self, workload: &Workload, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        let Some(stage) = self.stage else {
            return plan;
        };
        let critic = workload.critic_arch();
        plan.models = plan
            .models
            .into_iter()
            .map(|(role, model)| {
                let critic_arch = critic.filter(|_| role == Role::Critic);
                let part = body_of(critic_arch.unwrap_or(&workload.arch), stage);
                (role, model.within(&part))
            })
            .collect();
        plan
    }
}

/// Numbers of the matrices, and their biases, that are joined where sampling copies them.
fn joined(arch: &Arch) -> u64 {
    let queries = [Slot::Q, Slot::K, Slot::V, Slot::QBias, Slot::KBias, Slot::VBias];
    let mut slots = vec![Slot::Gate, Slot::Up];
    // a norm over all queries takes them by themselves
    if arch.qk_norm != Some(QkNorm::Projection) && !arch.attention_gate {
        slots.extend(queries);
    }
    let numbers = |(sublayer, count): (UnitKind, u64)| {
        let joined_specs = unit_specs(arch, sublayer).into_iter().filter(|spec| slots.contains(&spec.slot));
        count * joined_specs.map(|spec| spec.numel() as u64).sum::<u64>()
    };
    sublayers(arch).map(numbers).sum()
}
