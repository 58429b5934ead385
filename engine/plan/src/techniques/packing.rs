//! Rows without padding.

use crate::technique::Technique;
use crate::{MemoryConfig, ModelPlan, Result};
use firebrick_arch::Arch;

pub(crate) struct PackedRows;

impl Technique for PackedRows {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.packing"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) -> Result<()> {
        plan.layout = memory.packing.layout();
        Ok(())
    }
}
