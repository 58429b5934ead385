//! A plan as a file: what `firebrick plan --output` writes, what a run folder keeps, and what `train --plan` reads.

use super::estimate::{Parallel, PhaseEstimate, PhaseTraffic, Seconds};
use super::planner::{BatchProposal, Decision, Fit, FittingDegrees, GroupProposal, Request};
use super::{Plan, Role};
use crate::{AppliedPreset, Error, Result};
use firebrick_spec::Origin;
use firebrick_spec::file::{MAX_CONFIG_BYTES, read_text};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::Path;

/// A plan with what is predicted of it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PlanReport {
    /// Predicted peak of reserved device bytes (on the CPU: of the counted heap).
    pub peak_bytes: u64,
    /// Predicted peak of host bytes; where host and device are one memory, part of `peak_bytes`.
    pub host_peak_bytes: u64,
    /// The budget that it was made for.
    pub budget_bytes: Option<u64>,
    /// Share of the budget that was left free.
    pub margin: f64,
    /// Bytes by phase and category.
    pub phases: Vec<PhaseEstimate>,
    /// Estimated seconds of a step.
    pub seconds: Seconds,
    /// Division of the rollouts.
    pub batch: BatchProposal,
    /// Techniques in use, with savings and costs.
    pub decisions: Vec<Decision>,
    /// Other group sizes at as many rollouts per step, under the same settings.
    #[serde(default)]
    pub groups: Vec<GroupProposal>,
    /// The plan as settings of a configuration.
    pub settings: Vec<String>,
    /// The device that it was made for.
    pub device: String,
    /// Origin of the device's profile.
    pub profile: Origin,
    /// Devices of the estimate, if there are several: bytes are per device. The trainer runs the plan on as many ranks
    /// if it supports these kinds of parallelism.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<Parallel>,
    /// Traffic of one of several devices in a step, by phase and kind; its seconds are among those of the phases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub communication: Vec<PhaseTraffic>,
    /// Other degrees that fit, where they were chosen for a cluster, the fastest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_degrees: Vec<FittingDegrees>,
    /// Values of the configuration's preset, if it names one, for `firebrick plan` to report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preset: Option<AppliedPreset>,
    /// The plan.
    pub plan: Plan,
}

impl PlanReport {
    /// The report of a plan that was fitted.
    ///
    /// # Errors
    /// Those of [`Fit::decisions`] and [`Fit::groups`].
    pub fn new(request: &Request, fit: Fit) -> Result<Self> {
        Ok(Self {
            peak_bytes: fit.estimate.peak_bytes,
            host_peak_bytes: fit.estimate.host_peak_bytes,
            budget_bytes: request.budget,
            margin: request.memory.margin,
            decisions: fit.decisions(request)?,
            groups: fit.groups(request)?,
            settings: fit.overrides(),
            phases: fit.estimate.phases,
            seconds: fit.estimate.seconds,
            batch: fit.batch,
            device: request.profile.name.clone(),
            profile: request.profile.origin,
            parallel: Some(request.parallel).filter(Parallel::is_several),
            communication: fit.estimate.communication,
            other_degrees: Vec::new(),
            preset: None,
            plan: fit.plan,
        })
    }

    /// The phase with the peak.
    pub fn peak_phase(&self) -> Option<&PhaseEstimate> {
        self.phases.iter().max_by_key(|p| p.total_bytes)
    }
}

/// The ranks of a run that reads a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedFor {
    /// The number of ranks.
    pub ranks: usize,
    /// Sequence-parallel degree.
    pub sequence: usize,
    /// Sequence-parallel degree of the critic.
    pub critic_sequence: usize,
    /// Tensor-parallel degree of training.
    pub tensor: usize,
    /// Stages that layers are divided into.
    pub pipeline: usize,
    /// Tensor-parallel degree of sampling.
    pub sampling: usize,
}

impl PlannedFor {
    /// Refuses a plan for other ranks. `what` begins the message with the file's name.
    fn check(&self, parallel: &Parallel, what: &str) -> Result<()> {
        let refuse = |why: String| Err(Error::Plan(format!("{what}: {why}")));
        let made_for = format!("was made for {parallel}, and this run");
        if !parallel.is_supported() {
            return refuse(format!(
                "is an estimate for {parallel}, which the trainer does not run: it combines data parallelism with one \
                 of tensor, sequence and pipeline parallelism, and samples on groups without stages; pass only one of \
                 --tensor-parallel, --sequence-parallel and --pipeline-parallel to `firebrick plan` to make a plan \
                 that it runs"
            ));
        }
        let Self { ranks, sequence, critic_sequence, tensor, pipeline, sampling } = *self;
        for (key, planned, degree, option) in [
            ("memory.pipeline_model_parallel_size", parallel.pipeline, pipeline, "pipeline"),
            ("memory.tensor_model_parallel_size", parallel.tensor, tensor, "tensor"),
            ("memory.ulysses_sequence_parallel_size", parallel.sequence, sequence, "sequence"),
            ("critic.ulysses_sequence_parallel_size", parallel.critic().sequence, critic_sequence, ""),
            ("rollout.tensor_model_parallel_size", parallel.sampling().tensor, sampling, "rollout-tensor"),
        ] {
            let other = match option {
                "" => "for this configuration".to_owned(),
                _ => format!("with --{option}-parallel {degree}"),
            };
            if planned != degree as u64 {
                return refuse(format!("{made_for}'s {key} is {degree}; set it to {planned}, or make a plan {other}"));
            }
        }
        if parallel.devices() != ranks as u64 {
            return refuse(format!(
                "{made_for} has {ranks}; start it with `mpirun -n {} firebrick train …`, or make a plan with --data-parallel {}",
                parallel.devices(),
                ranks / (sequence * tensor * pipeline).max(1)
            ));
        }
        Ok(())
    }
}

impl Plan {
    /// Reads the plan of a file that `firebrick plan --output` wrote, or of a run folder's `plan.json`, for a run on
    /// these ranks.
    ///
    /// # Errors
    /// If the file cannot be read, has no plan, or one for another number of ranks or for other kinds of parallelism.
    pub fn load(path: &Path, run: &PlannedFor) -> Result<Self> {
        let text = read_text(path, MAX_CONFIG_BYTES).map_err(|error| Error::Read { path: path.to_owned(), error })?;
        Self::from_json(&text, path, run)
    }

    /// The plan in the text of such a file. Messages name the path.
    ///
    /// # Errors
    /// As [`load`](Self::load) does, but for files that cannot be read.
    pub fn from_json(text: &str, path: &Path, run: &PlannedFor) -> Result<Self> {
        let bad = |detail: String| {
            Error::Plan(format!("{}: {detail}; `firebrick plan CONFIG --output FILE` writes a plan", path.display()))
        };
        let file: Value = serde_json::from_str(text).map_err(|e| bad(format!("is not JSON: {e}")))?;
        let name = path.display().to_string();
        match file.get("parallel").filter(|p| !p.is_null()) {
            Some(parallel) => {
                let parallel: Parallel = serde_path_to_error::deserialize(parallel)
                    .map_err(|e| bad(format!("parallel.{}: {}", e.path(), e.inner())))?;
                run.check(&parallel, &name)?;
            }
            // one of a device alone is also that of ranks that share nothing
            None if run.pipeline > 1 => run.check(&Parallel::default(), &name)?,
            None => {}
        }
        let Some(plan) = file.get("plan") else {
            return Err(bad("has no `plan`".into()));
        };
        let plan: Self =
            serde_path_to_error::deserialize(plan).map_err(|e| bad(format!("plan.{}: {}", e.path(), e.inner())))?;
        if !plan.models.contains_key(&Role::Policy) {
            return Err(bad("plan.models has no `policy`".into()));
        }
        if plan.rollout.max_num_seqs == 0 {
            return Err(bad("plan.rollout.max_num_seqs should be at least 1".into()));
        }
        Ok(plan)
    }
}
