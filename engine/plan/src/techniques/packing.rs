//! Rows without padding.

use crate::technique::prelude::*;

pub(crate) struct PackedRows;

impl Technique for PackedRows {
    fn about(&self) -> About {
        About { keys: &["memory.packing"], kind: TechniqueKind::Set, examples: &[] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.layout = memory.layout();
    }
}
