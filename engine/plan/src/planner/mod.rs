//! The plan with the least estimated time that fits a budget.
//!
//! Pure arithmetic on architecture, lengths and a [`DeviceProfile`]: no device, no weights. The search is exhaustive over
//! the combinations of `candidates`: where weights, gradients and the optimizer's state live, what segments keep, how many
//! rows head and attention take, how many tokens a micro-batch has, how many sequences are sampled at a time. Phases do not
//! run at the same time, so each is fitted by itself once it is settled where everything lives.
//!
//! Moments of fewer bits change results a little. They are counted as if they took [`lossy`] times as long, so that the
//! planner takes them only where exact ways to save as much cost more than that.

mod candidates;
mod explain;
mod groups;
mod nothing;
mod search;

pub use explain::Decision;
pub use groups::GroupProposal;
pub use nothing::NothingFits;
pub use search::lossy;

use crate::estimate::{Estimate, Parallel, Workload, estimate_parallel};
use crate::{Error, MemoryConfig, Plan, Result};
use candidates::Candidate;
use firebrick_spec::DeviceProfile;
use search::Limits;
use serde::{Deserialize, Serialize};

/// What is to be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// What the run does.
    pub workload: Workload,
    /// Its `memory` section: token budgets and rows are upper limits; whether weights, gradients, moments and inputs move
    /// is the planner's choice.
    pub memory: MemoryConfig,
    /// Most sequences sampled at a time.
    pub max_num_seqs: usize,
    /// The device.
    pub profile: DeviceProfile,
    /// Device bytes, the margin included; no limit where absent.
    pub budget: Option<u64>,
    /// Host bytes; no limit where absent. Where host and device are one memory the device's budget covers both.
    pub host_budget: Option<u64>,
    /// Devices that share the run; all bytes are those of one of them. The trainer runs on one.
    pub parallel: Parallel,
}

/// How a step's rollouts are cut, at a constant number of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct BatchProposal {
    /// Prompts a step.
    pub prompts: u64,
    /// Completions a prompt.
    pub group_size: u64,
    /// Rollouts of one optimizer step: what stays the same.
    pub effective_batch: u64,
    /// Sequences of a micro-batch, all as long as allowed, of one device.
    pub micro_batch: u64,
    /// Micro-batches an optimizer step.
    pub accumulation: u64,
    /// Sequences sampled at a time, by one device.
    pub max_num_seqs: u64,
}

/// A plan that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The plan.
    pub plan: Plan,
    /// The settings that spell it out.
    pub memory: MemoryConfig,
    /// Its bytes and seconds.
    pub estimate: Estimate,
    /// How rollouts are cut.
    pub batch: BatchProposal,
}

/// What went wrong under a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// The phase that ran out of memory, by the estimate's name; any where absent.
    pub phase: Option<String>,
    /// Bytes that were in use, where they could be counted.
    pub used: Option<u64>,
    /// Bytes that there are.
    pub limit: Option<u64>,
}

/// Share of the failed plan's predicted bytes that the next one has to save at least.
const STEP_DOWN: f64 = 0.1;

impl Request {
    /// The same request with the run spread over several devices, which the workload must be divisible by.
    pub fn spread(mut self, parallel: Parallel) -> Result<Self> {
        parallel.check(&self.workload)?;
        self.parallel = parallel;
        Ok(self)
    }

    fn estimate(&self, plan: &Plan) -> Estimate {
        estimate_parallel(&self.workload, plan, &self.profile, &self.parallel)
    }

    /// What the predicted peak may be: the budget less its margin.
    #[must_use]
    pub fn allowed(&self) -> Option<u64> {
        let share = 1.0 - self.memory.margin;
        self.budget.map(|b| (b as f64 * share) as u64)
    }

    fn limits(&self) -> Limits {
        Limits {
            device: self.allowed().unwrap_or(u64::MAX),
            host: self.host_budget.unwrap_or(u64::MAX),
            phase: None,
        }
    }

    /// The plan that the settings spell out, with its estimate, whether it fits or not.
    pub fn as_configured(&self) -> Result<Fit> {
        self.settled(Candidate {
            memory: self.memory.clone(),
            max_num_seqs: self.max_num_seqs,
        })
    }

    /// The plan with the least estimated time that fits.
    pub fn fit(&self) -> Result<Fit> {
        match search::search(&self.within_buffers(), &self.limits())? {
            Some(best) => self.settled(best),
            None => Err(Error::NothingFits(Box::new(nothing::explain(self)?))),
        }
    }

    /// The fastest plan that should get by where `current` ran out of memory: its prediction stays a tenth below the
    /// current one's, and below the limit by as much as the failed prediction was too low.
    pub fn next_cheaper(&self, current: &Plan, failure: &Failure) -> Result<Fit> {
        let failed = self.estimate(current);
        let phase = failure.phase.as_deref().and_then(|name| failed.phase(name));
        let predicted = phase.map_or(failed.peak_bytes, |p| p.total_bytes);
        let below = (predicted as f64 * (1.0 - STEP_DOWN)) as u64;
        let bound = match (failure.used, failure.limit) {
            (Some(used), Some(limit)) if used > 0 => {
                below.min((limit as f64 * predicted as f64 / used as f64) as u64)
            }
            (_, Some(limit)) => below.min(limit),
            _ => below,
        };
        let mut limits = self.limits();
        match phase {
            Some(phase) => limits.phase = Some((phase.name.clone(), bound)),
            None => limits.device = limits.device.min(bound),
        }
        match search::search(&self.within_buffers(), &limits)? {
            Some(best) => self.settled(best),
            None => {
                let mut tighter = self.clone();
                tighter.budget = Some((bound as f64 / (1.0 - self.memory.margin)) as u64);
                Err(Error::NothingFits(Box::new(nothing::explain(&tighter)?)))
            }
        }
    }

    /// What is predicted of any plan, whoever made it.
    #[must_use]
    pub fn judge(&self, plan: Plan) -> Fit {
        self.described(plan, self.memory.clone())
    }

    fn settled(&self, candidate: Candidate) -> Result<Fit> {
        let plan = candidate.plan(&self.workload)?;
        self.check_buffers(&plan)?;
        Ok(self.described(plan, candidate.memory))
    }

    fn described(&self, plan: Plan, memory: MemoryConfig) -> Fit {
        let estimate = self.estimate(&plan);
        let w = &self.workload;
        let policy = plan.policy();
        let fits = (policy.train_tokens as u64 / w.scored_length().max(1)).max(1);
        let most = policy.micro_batch_size.map_or(u64::MAX, |n| n as u64);
        let own = self.parallel.sequences(w.mini_rollouts());
        let micro_batch = fits.min(most).min(own);
        Fit {
            batch: BatchProposal {
                prompts: w.prompts,
                group_size: w.group,
                effective_batch: w.mini_rollouts(),
                micro_batch,
                accumulation: own.div_ceil(micro_batch),
                max_num_seqs: plan.rollout.max_num_seqs as u64,
            },
            memory,
            estimate,
            plan,
        }
    }
}

#[cfg(test)]
mod tests;
