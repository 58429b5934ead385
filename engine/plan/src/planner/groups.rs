//! Other group sizes at as many rollouts per step: what each would take under the settings of a plan.

use super::fit::Fit;
use crate::Result;
use crate::request::{Candidate, Request};
use crate::techniques::concurrent_sequences::sequences;
use serde::{Deserialize, Serialize};

/// A group size that the plan's settings could serve, and what that would take.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct GroupProposal {
    /// Completions per prompt.
    pub group_size: u64,
    /// Prompts per step: as many rollouts as now.
    pub prompts: u64,
    /// Sequences sampled at a time.
    pub max_num_seqs: u64,
    /// Predicted peak of reserved device bytes.
    pub peak_bytes: u64,
    /// Estimated seconds of a step.
    pub seconds: f64,
    /// True if that keeps within the budgets.
    pub fits: bool,
}

impl Fit {
    /// Half, a quarter, twice and four times the group size, where as many rollouts make whole steps of them. Larger
    /// groups share more of their prompts' keys and values; the objective decides how many completions a prompt needs.
    ///
    /// # Errors
    /// Those of [`Request::fit`], apart from `Error::Infeasible`.
    pub fn groups(&self, request: &Request) -> Result<Vec<GroupProposal>> {
        let w = &request.workload;
        let sizes = [w.group / 4, w.group / 2, w.group * 2, w.group * 4];
        let whole = |&group: &u64| {
            // a group of one has nothing to be compared with
            group > 1 && w.mini_rollouts().is_multiple_of(group) && w.rollouts().is_multiple_of(group)
        };
        // an objective without groups has none to choose, and a quarter of an odd one is another number of rollouts
        if w.group < 2 || w.examples.is_some() {
            return Ok(Vec::new());
        }
        sizes.into_iter().filter(whole).map(|group| self.with_group(request, group)).collect()
    }

    fn with_group(&self, request: &Request, group: u64) -> Result<GroupProposal> {
        let mut changed = request.clone();
        let w = &mut changed.workload;
        (w.prompts, w.mini_batch) = (w.rollouts() / group, w.mini_rollouts() / group);
        w.group = group;
        let mut best: Option<GroupProposal> = None;
        for max_num_seqs in sequences(&changed) {
            let candidate = Candidate { memory: self.memory.clone(), max_num_seqs };
            let estimate = changed.estimate(&candidate.plan(&changed.workload)?);
            let proposal = GroupProposal {
                group_size: group,
                prompts: changed.workload.prompts,
                max_num_seqs: max_num_seqs as u64,
                peak_bytes: estimate.peak_bytes,
                seconds: estimate.seconds.total(),
                fits: changed.limits().hold_peaks(&estimate),
            };
            let better = best.as_ref().is_none_or(|best| (proposal.fits, best.seconds) > (best.fits, proposal.seconds));
            if better {
                best = Some(proposal);
            }
        }
        Ok(best.expect("at least one group is sampled at a time"))
    }
}
