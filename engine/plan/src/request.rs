//! The request to plan a run, and a candidate for its plan.

use crate::estimate::{Estimate, EstimatePhase, Parallel, Stages, Workload};
use crate::{MemoryConfig, Plan, Result, Zero};
use firebrick_spec::DeviceProfile;
use std::collections::BTreeMap;

/// A run to be planned: its work, settings, device and budgets.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The work of the run.
    pub workload: Workload,
    /// Its `memory` section: token budgets and rows are upper limits; whether weights, gradients, moments and inputs
    /// move is the planner's choice.
    pub memory: MemoryConfig,
    /// Most sequences sampled at a time.
    pub max_num_seqs: usize,
    /// The device.
    pub profile: DeviceProfile,
    /// Device bytes, the margin included; no limit where absent.
    pub budget: Option<u64>,
    /// Host bytes; no limit where absent. Where host and device are one memory the device's budget covers both.
    pub host_budget: Option<u64>,
    /// Device bytes that phases may take where memory has run out in them: see [`Self::learn`].
    pub phase_limits: BTreeMap<EstimatePhase, u64>,
    /// Devices of the run; bytes are per device.
    pub parallel: Parallel,
    /// Ranks of the run. Those that share nothing out are each planned as if alone (`parallel` is one device), and sum
    /// gradients all the same.
    pub ranks: usize,
}

impl Request {
    /// Spreads the run over several devices, which must divide the workload.
    ///
    /// # Errors
    /// `Error::Config`: see [`Parallel::check`].
    pub fn spread(mut self, parallel: Parallel) -> Result<Self> {
        parallel.check(&self.workload)?;
        self.parallel = parallel;
        Ok(self)
    }

    /// True if the trainer runs the request on its devices.
    pub fn is_supported(&self) -> bool {
        let parallel = &self.parallel;
        parallel.is_supported() && parallel.trains(&self.workload) && parallel.samples(&self.workload)
    }

    /// True if a plan may update a segment in the backward pass: no gradient has to be seen whole first, and none is
    /// complete only when other devices have theirs.
    pub(crate) fn allows_step_in_backward(&self) -> bool {
        let alone = self.ranks <= 1 && !self.parallel.is_several();
        alone && self.memory.zero() == Zero::Off && self.workload.allows_step_in_backward()
    }

    pub(crate) fn estimate(&self, plan: &Plan) -> Estimate {
        self.estimate_of(&self.stages(), plan)
    }

    /// The parameters of its devices: the same under every plan.
    pub(crate) fn stages(&self) -> Stages {
        Stages::new(&self.workload, &self.parallel)
    }

    /// Bytes and seconds of a plan, given its stages.
    pub(crate) fn estimate_of(&self, stages: &Stages, plan: &Plan) -> Estimate {
        stages.estimate(&self.workload, plan, &self.profile, &self.parallel)
    }

    /// Limit of the predicted peak: the budget less its margin.
    pub fn allowed(&self) -> Option<u64> {
        let share = 1.0 - self.memory.margin;
        self.budget.map(|b| (b as f64 * share) as u64)
    }
}

/// Settings of a plan: those of `memory`, and the sequences sampled at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The `memory` section.
    pub memory: MemoryConfig,
    /// Most sequences sampled at a time.
    pub max_num_seqs: usize,
}

impl Candidate {
    /// The plans of a workload's models under these settings, which are within their range.
    ///
    /// # Errors
    /// Those of [`MemoryConfig::plans`].
    pub fn plan(&self, workload: &Workload) -> Result<Plan> {
        let critic = workload.critic_arch();
        self.memory.plans_in_range(&workload.arch, workload.reference, critic, self.max_num_seqs)
    }
}
