//! Sequences sampled at a time, whose keys and values are there together.

use crate::technique::prelude::*;

/// Sequences that the planner tries: whole groups, the most first.
pub(crate) fn sequences(request: &Request) -> Vec<usize> {
    let group = request.workload.group.max(1);
    let prompts = request.parallel.sampling().sequences(request.workload.prompts);
    let most = (request.max_num_seqs as u64 / group).clamp(1, prompts.max(1));
    let mut counts: Vec<u64> = std::iter::successors(Some(most), |n| (*n > 1).then(|| n.div_ceil(2))).collect();
    counts.dedup();
    counts.iter().map(|n| (n * group) as usize).collect()
}

pub(crate) struct ConcurrentSequences;

impl Technique for ConcurrentSequences {
    fn about(&self) -> About {
        About { keys: &["rollout.max_num_seqs"], kind: TechniqueKind::Set, examples: &[] }
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let workload = &request.workload;
        let step = request.parallel.sampling().sequences(workload.prompts) * workload.group;
        let is_fewer = (used.max_num_seqs as u64) < (request.max_num_seqs as u64).min(step);
        (workload.samples() && is_fewer).then_some("fewer sequences sampled at a time")
    }

    fn undo(&self, used: &mut Candidate, request: &Request) {
        used.max_num_seqs = request.max_num_seqs;
    }
}
