//! Copies and gathers ahead of the computation.

use crate::technique::prelude::*;

pub(crate) struct Prefetch;

impl Technique for Prefetch {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.prefetch"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.prefetch = memory.prefetch;
    }
}
