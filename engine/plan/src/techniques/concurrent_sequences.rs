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
    fn keys(&self) -> &'static [&'static str] {
        &["rollout.max_num_seqs"]
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<Explanation> {
        let workload = &request.workload;
        let most = request.max_num_seqs;
        let step = request.parallel.sampling().sequences(workload.prompts) * workload.group;
        (workload.samples() && (used.max_num_seqs as u64) < (most as u64).min(step))
            .then(|| used.explained("fewer sequences sampled at a time", self.keys(), |c| c.max_num_seqs = most))
    }
}
