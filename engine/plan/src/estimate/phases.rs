//! The phases of a step, one after the other, and the estimate of a plan.

use crate::estimate::bytes::{sample, train};
use crate::estimate::seconds;
use crate::estimate::{
    Activity, Context, Estimate, EstimatePhase, F32, MemoryUsage, Parallel, PhaseEstimate, PhaseTraffic, Stages,
    Workload,
};
use crate::{ModelPlan, Plan, Role};
use firebrick_spec::{Backend, Category, DeviceProfile};

impl Context<'_> {
    /// Loading: weights come from a file one matrix at a time; a critic that starts from the policy gathers its weights
    /// from all devices.
    pub fn load(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Load, |peak| {
            let mut held = self.resident(Activity::Pass(Role::Policy));
            held.device.clear(Category::Moments);
            held.host.clear(Category::Moments);
            let matrix = F32 * self.largest();
            let held = self.with_largest_unit(held);
            let critic = self.workload.critic.as_ref();
            let held = if critic.is_some_and(|critic| critic.starts_from_policy) {
                self.with_gathered_matrix(held)
            } else {
                held
            };
            peak.record("reading weights", held.on_host(Category::Buffers, matrix));
        })
    }

    /// Adds the largest matrix of the policy, which devices with parts of it gather.
    fn with_gathered_matrix(&self, held: MemoryUsage) -> MemoryUsage {
        let divided = self.stage.is_some() || self.parallel.gathers() || self.parallel.tensor > 1;
        if !divided {
            return held;
        }
        let whole = &self.counted.whole_policy;
        let gathered = whole.width * whole.largest;
        held.on_host(Category::Communication, gathered)
            .on_device(Category::Communication, self.parallel.staged(gathered))
    }

    /// Adds the buffers of reading a policy that is divided over devices: the largest unit with ZeRO-3 or pipeline
    /// stages, and the largest matrix with tensor parallelism.
    fn with_largest_unit(&self, held: MemoryUsage) -> MemoryUsage {
        let Some((role, _)) = self.trained.first() else {
            return held;
        };
        let whole = &self.counted.whole_policy;
        let mut bytes = 0;
        if self.stage.is_some() || self.parallel.gathers() {
            bytes += self.parallel.tensor_share(whole.largest_shared_unit());
        }
        if self.parallel.tensor > 1 {
            bytes += whole.width * whole.largest;
        }
        held.on_device(role.category(), bytes)
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
    pub fn critic_phases(&self) -> Vec<PhaseEstimate> {
        let phases = |critic: Self| {
            let backward = critic.backward().named(EstimatePhase::CriticBackward);
            vec![critic.values(), backward, critic.optimizer().named(EstimatePhase::CriticOptimizer)]
        };
        self.critic().map(phases).unwrap_or_default()
    }

    /// The phases of the warm-up: its backward pass, its update.
    pub fn warm_up_phases(&self) -> Vec<PhaseEstimate> {
        let phases = |warm: Self| {
            let backward = warm.backward().named(EstimatePhase::WarmupBackward);
            vec![backward, warm.optimizer().named(EstimatePhase::WarmupOptimizer)]
        };
        self.warming_up().map(phases).unwrap_or_default()
    }

    /// Forward passes of the critic, for values.
    pub fn values(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Values, |peak| {
            sample::score(self, self.model(), Activity::Pass(self.role), peak);
        })
    }

    /// The largest matrix of any model that is trained.
    fn largest(&self) -> u64 {
        self.trained.iter().map(|(_, sizes)| sizes.largest).max().unwrap_or(0)
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
            let base = self.resident(Activity::Update(self.role)) + self.rollouts();
            let held = |bytes| base.and(plan.grads, Category::Gradients, bytes);
            let kernels = &self.profile.kernels;
            let update = self.state(plan).update_buffers(kernels);
            peak.record("the update", held(bytes) + update);
            self.gathered_updates(held, peak);
        })
    }

    /// A lower bound of the training phases, without a micro-batch's activations: a plan that lacks the memory for it
    /// need not be looked at in all sizes.
    pub fn least_of_training(&self) -> Vec<PhaseEstimate> {
        let backward = self.phase(EstimatePhase::Backward, |peak| {
            peak.record("resident", self.resident(Activity::Pass(self.role)));
        });
        // an update in the backward pass leaves gradients behind by the number of micro-batches
        let optimizer = (!self.model().optimizer.in_backward).then(|| self.optimizer());
        std::iter::once(backward).chain(optimizer).collect()
    }

    /// A checkpoint is written one matrix at a time: its values, and their bytes twice while they grow, beside the
    /// matrix itself where devices give each other their parts of it.
    pub fn save(&self) -> PhaseEstimate {
        self.phase(EstimatePhase::Save, |peak| {
            let held = self.resident(Activity::Pass(Role::Policy)).on_host(Category::Buffers, self.save_buffers());
            let held = self.with_gathered_matrix(held);
            peak.record("writing a checkpoint", held);
        })
    }

    fn save_buffers(&self) -> u64 {
        3 * F32 * self.largest()
    }

    /// True if a thread can write checkpoints while the next step samples and scores, within the peak of `phases`. It
    /// shares the values with the run, which needs one memory and state that no phase moves.
    fn saves_beside(&self, phases: &[PhaseEstimate], peak: u64) -> bool {
        let trained = [Some(self.plan.policy()), self.plan.critic()];
        let fits = |phase: &PhaseEstimate| phase.total_bytes + self.save_buffers() <= peak;
        self.workload.saves_beside
            && self.profile.backend == Backend::Cpu
            && !self.parallel.is_several()
            && trained.into_iter().flatten().all(ModelPlan::stays_on_device)
            && phases.iter().filter(|phase| phase.name.is_before_updates()).all(fits)
    }

    pub fn estimate(&self) -> Estimate {
        let mut phases = vec![self.load()];
        phases.extend(self.warm_up_phases());
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
        phases.extend(self.critic_phases());
        phases.push(self.save());
        let most = |f: fn(&PhaseEstimate) -> u64| phases.iter().map(f).max().unwrap_or(0);
        let (peak_bytes, host_peak_bytes) = (most(|p| p.total_bytes), most(|p| p.host_bytes));
        let saves_beside = self.saves_beside(&phases, peak_bytes);
        if saves_beside {
            let beside = phases.iter_mut().filter(|phase| phase.name.is_before_updates());
            beside.for_each(|phase| phase.add_save(self.save_buffers()));
        }
        Estimate {
            peak_bytes,
            host_peak_bytes,
            saves_beside,
            seconds: seconds::step_seconds(self),
            communication: self.traffic(),
            phases,
        }
    }
}

impl Estimate {
    /// The needs of the stage that binds in each phase: the ranks have one plan.
    pub(super) fn slowest_of(stages: impl IntoIterator<Item = Self>) -> Self {
        let mut stages = stages.into_iter();
        let first = stages.next().unwrap_or_else(|| unreachable!("there is at least one stage"));
        stages.fold(first, Self::max)
    }

    fn max(mut self, other: Self) -> Self {
        self.peak_bytes = self.peak_bytes.max(other.peak_bytes);
        self.host_peak_bytes = self.host_peak_bytes.max(other.host_peak_bytes);
        self.seconds = self.seconds.max(&other.seconds);
        for (phase, theirs) in self.phases.iter_mut().zip(other.phases) {
            let host_bytes = phase.host_bytes.max(theirs.host_bytes);
            if theirs.total_bytes > phase.total_bytes {
                *phase = theirs;
            }
            phase.host_bytes = host_bytes;
        }
        for theirs in other.communication {
            let place = |sent: &&mut PhaseTraffic| {
                (sent.phase, sent.kind, sent.along) == (theirs.phase, theirs.kind, theirs.along)
            };
            match self.communication.iter_mut().find(place) {
                Some(sent) => {
                    sent.messages = sent.messages.max(theirs.messages);
                    sent.bytes = sent.bytes.max(theirs.bytes);
                    sent.seconds = sent.seconds.max(theirs.seconds);
                }
                None => self.communication.push(theirs),
            }
        }
        self
    }
}

/// Bytes and seconds of a plan on one device.
pub fn estimate(workload: &Workload, plan: &Plan, profile: &DeviceProfile) -> Estimate {
    estimate_parallel(workload, plan, profile, &Parallel::default())
}

/// Bytes and seconds of one of several devices; where these have stages of a pipeline, of the stage that binds in each
/// phase. See [`parallel`](super::parallel).
pub fn estimate_parallel(workload: &Workload, plan: &Plan, profile: &DeviceProfile, parallel: &Parallel) -> Estimate {
    Stages::new(workload, parallel).estimate(workload, plan, profile, parallel)
}

/// Bytes and seconds of every stage, in order; of one device without stages.
pub fn estimate_stages(
    workload: &Workload,
    plan: &Plan,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Vec<Estimate> {
    let stages = Stages::new(workload, parallel);
    let plans = stages.plans(workload, plan);
    plans.contexts(workload, profile, parallel).map(|ctx| ctx.estimate()).collect()
}
