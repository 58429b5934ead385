//! Logits of a chunk computed again for its gradient, where a GPU takes the vocabulary in tiles.

use super::head_rows::HeadCost;
use crate::technique::prelude::*;

pub(crate) struct RecomputedLogits;

impl Technique for RecomputedLogits {
    fn about(&self) -> About {
        About { keys: &["memory.recompute_logits"], kind: TechniqueKind::Chosen, examples: &["recompute_logits: true"] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.recompute_logits = memory.recompute_logits;
    }

    fn kept(&self, memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
        let has_tiles = HeadCost::new(&request.workload.arch, memory.head_rows, &request.profile).in_tiles();
        if has_tiles { and(memory, |m| m.recompute_logits = true) } else { vec![memory.clone()] }
    }

    fn explain(&self, used: &Candidate, _: &Request) -> Option<&'static str> {
        used.memory.recompute_logits.then_some("logits are computed again for their gradient")
    }
}
