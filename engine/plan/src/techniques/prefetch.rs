//! Copies and gathers ahead of the computation.

use crate::technique::Technique;
use crate::{MemoryConfig, ModelPlan, Result};
use firebrick_arch::Arch;

pub(crate) struct Prefetch;

impl Technique for Prefetch {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.prefetch"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) -> Result<()> {
        plan.prefetch = memory.prefetch;
        Ok(())
    }
}
