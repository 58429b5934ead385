//! Rows without padding.

use crate::technique::prelude::*;

pub(crate) struct PackedRows;

impl Technique for PackedRows {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.packing"]
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.layout = memory.layout();
    }
}
