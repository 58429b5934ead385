//! Copies and gathers ahead of the computation.

use crate::technique::prelude::*;

pub(crate) struct Prefetch;

impl Technique for Prefetch {
    fn about(&self) -> About {
        About { keys: &["memory.prefetch"], kind: TechniqueKind::Set, examples: &[] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.prefetch = memory.prefetch;
    }
}
