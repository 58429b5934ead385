//! A plan with what is predicted of it.

use crate::estimate::Estimate;
use crate::request::{Candidate, Request};
use crate::{MemoryConfig, Plan, Result};
use serde::{Deserialize, Serialize};

/// Division of a step's rollouts into micro-batches, at a constant number of rollouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct BatchProposal {
    /// Prompts per step.
    pub prompts: u64,
    /// Completions per prompt.
    pub group_size: u64,
    /// Rollouts of one optimizer step: what stays the same.
    pub effective_batch: u64,
    /// Sequences of a micro-batch, all as long as allowed, of one device.
    pub micro_batch: u64,
    /// Micro-batches per optimizer step.
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
    /// Division of the rollouts.
    pub batch: BatchProposal,
}

impl Request {
    /// The prediction for any plan.
    pub fn predict(&self, plan: Plan) -> Fit {
        self.fit_of(plan, self.memory.clone())
    }

    pub(super) fn fit_candidate(&self, candidate: Candidate) -> Result<Fit> {
        let plan = candidate.plan(&self.workload)?;
        self.check_buffers(&plan)?;
        Ok(self.fit_of(plan, candidate.memory))
    }

    fn fit_of(&self, plan: Plan, memory: MemoryConfig) -> Fit {
        let estimate = self.estimate(&plan);
        let w = &self.workload;
        let policy = plan.policy();
        let fits = w.training_tree(policy.layout).sequences_within(policy.train_tokens as u64);
        let most = policy.micro_batch_size.map_or(u64::MAX, |n| n as u64);
        let sequences = self.parallel.sequences(w.mini_rollouts());
        let micro_batch = fits.min(most).min(sequences);
        Fit {
            batch: BatchProposal {
                prompts: w.prompts,
                group_size: w.group,
                effective_batch: w.mini_rollouts(),
                micro_batch,
                accumulation: sequences.div_ceil(micro_batch),
                max_num_seqs: plan.rollout.max_num_seqs as u64,
            },
            memory,
            estimate,
            plan,
        }
    }
}
