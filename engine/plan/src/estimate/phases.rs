//! The phases of a step, one after the other, and the estimate of a plan.

use super::context::{Context, ModelSizes};
use super::parallel::Parallel;
use super::phase::EstimatePhase;
use super::result::{Estimate, PhaseEstimate};
use super::sizes::F32;
use super::states::{self, Activity};
use super::usage::MemoryUsage;
use super::workload::Workload;
use super::{sample, time, train};
use crate::{Plan, Role};
use firebrick_spec::{Category, DeviceProfile};

impl Context<'_> {
    /// Weights come from a file one matrix at a time.
    pub fn load(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Load, |peak| {
            let mut held = self.resident(Activity::Pass(Role::Policy));
            held.device.clear(Category::Moments);
            held.host.clear(Category::Moments);
            let held = self.with_whole_weights(held);
            let matrix = F32 * self.largest();
            // a policy with adapters, or one that a critic starts from, is whole before ranks that share matrices cut it
            let adapted = self.workload.lora.is_some() || self.critic().is_some();
            let held = match self.trained.first() {
                Some((role, sizes)) if self.parallel.tensor > 1 && adapted => {
                    held.on_device(role.category(), sizes.width * sizes.total())
                }
                _ => held,
            };
            peak.record("reading weights", held.on_host(Category::Buffers, matrix));
        })
    }

    /// Adds what devices that share out weights lack of those of models that are trained: they are whole while they are read and written.
    fn with_whole_weights(&self, held: MemoryUsage) -> MemoryUsage {
        if !self.parallel.gathers() {
            return held;
        }
        self.trained.iter().fold(held, |held, (role, sizes)| {
            let numbers = if sizes.is_tied() {
                sizes.body()
            } else {
                sizes.total()
            };
            let whole = self.parallel.replicated().weights(sizes.width * numbers);
            let lacking = whole - self.parallel.weights(sizes.width * numbers);
            held.on_device(role.category(), lacking)
        })
    }

    pub fn rollout(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Rollout, |peak| sample::rollout(self, peak))
    }

    pub fn score(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Score, |peak| {
            if self.workload.policy_scores() {
                sample::score(self, self.plan.policy(), Activity::Pass(Role::Policy), peak);
            }
            if let Some(reference) = self.plan.reference() {
                sample::score(self, reference, Activity::Pass(Role::Reference), peak);
            }
        })
    }

    /// Forward passes of the reward models, one model after the other.
    pub fn reward_scores(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Reward, |peak| {
            for (index, (plan, _)) in self.rewards.iter().enumerate() {
                sample::score(&self.reward(index), plan, Activity::Reward(index), peak);
            }
        })
    }

    /// The critic's phases: its values, its backward pass, its update.
    pub fn of_critic(&self) -> Vec<PhaseEstimate> {
        let Some(critic) = self.critic() else {
            return Vec::new();
        };
        vec![
            critic.values(),
            critic.backward().named(EstimatePhase::CriticBackward),
            critic.optimizer().named(EstimatePhase::CriticOptimizer),
        ]
    }

    /// The phases of the warm-up: its backward pass, its update.
    pub fn of_warm_up(&self) -> Vec<PhaseEstimate> {
        let Some(warm) = self.warming_up() else {
            return Vec::new();
        };
        vec![
            warm.backward().named(EstimatePhase::WarmupBackward),
            warm.optimizer().named(EstimatePhase::WarmupOptimizer),
        ]
    }

    /// Forward passes of the critic, for values.
    pub fn values(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Values, |peak| {
            sample::score(self, self.model(), Activity::Pass(self.role), peak);
        })
    }

    /// The largest matrix of any model that is trained.
    fn largest(&self) -> u64 {
        let all = self.trained.iter().map(|(_, sizes)| sizes.largest);
        all.max().unwrap_or(0)
    }

    pub fn backward(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Backward, |peak| {
            train::BackwardPass::new(self).run(peak);
        })
    }

    pub fn optimizer(&self) -> PhaseEstimate {
        let plan = self.model();
        self.phase(EstimatePhase::Optimizer, |peak| {
            let gradients = if plan.optimizer.in_backward && self.micro_batches() == 1 {
                self.sizes.trained_ends(self.sizes.ends())
            } else {
                self.sizes.trained()
            };
            // summed by now: a rank has the shards that it updates
            let bytes = self.parallel.optimizer(F32 * gradients);
            let gathered = self.parallel.host_buffers(&self.sizes);
            let held = self.resident(Activity::Update(self.role))
                + states::update_buffers(&self.sizes, plan, self.parallel, &self.profile.kernels)
                + self.rollouts();
            let held = held.on_host(Category::Communication, gathered);
            peak.record(
                "the update",
                held.and(plan.grads, Category::Gradients, bytes),
            );
        })
    }

    /// A checkpoint is written one matrix at a time: its values, and their bytes twice while they grow.
    pub fn save(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Save, |peak| {
            let matrix = 3 * F32 * self.largest();
            let held = self
                .resident(Activity::Pass(Role::Policy))
                .on_host(Category::Buffers, matrix);
            let held = self.with_whole_weights(held);
            // the first of ranks that share matrices puts the models together
            let held = match self.parallel.tensor {
                1 => held,
                _ => self.trained.iter().fold(held, |held, (role, sizes)| {
                    held.on_host(role.category(), sizes.width * sizes.total())
                }),
            };
            peak.record("writing a checkpoint", held);
        })
    }

    pub fn estimate(&self) -> Estimate {
        let mut phases = vec![self.load()];
        phases.extend(self.of_warm_up());
        if self.workload.samples() {
            phases.push(self.rollout());
        }
        if !self.rewards.is_empty() {
            phases.push(self.reward_scores());
        }
        let w = self.workload;
        if w.policy_scores() || self.plan.reference().is_some() {
            phases.push(self.score());
        }
        phases.extend([self.backward(), self.optimizer()]);
        phases.extend(self.of_critic());
        phases.push(self.save());
        let most = |f: fn(&PhaseEstimate) -> u64| phases.iter().map(f).max().unwrap_or(0);
        Estimate {
            peak_bytes: most(|p| p.total_bytes),
            host_peak_bytes: most(|p| p.host_bytes),
            seconds: time::seconds(self),
            communication: self.traffic(),
            phases,
        }
    }
}

/// Bytes and seconds of a plan on one device.
#[must_use]
pub fn estimate(workload: &Workload, plan: &Plan, profile: &DeviceProfile) -> Estimate {
    estimate_parallel(workload, plan, profile, &Parallel::default())
}

/// Bytes and seconds of one of several devices. See [`parallel`](super::parallel).
#[must_use]
pub fn estimate_parallel(
    workload: &Workload,
    plan: &Plan,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Estimate {
    let sizes = ModelSizes::of(workload, parallel);
    Context::new(workload, plan, profile, parallel, &sizes).estimate()
}
