//! Chunks of logits.

use super::down;
use crate::technique::prelude::*;

/// Rows that the planner tries, the most first.
pub(crate) fn head_rows(most: usize) -> Vec<usize> {
    down(most, &[512, 256, 128, 64])
}

pub(crate) struct HeadRows;

impl Technique for HeadRows {
    fn keys(&self) -> &'static [&'static str] {
        &["memory.head_rows"]
    }

    fn check(&self, memory: &MemoryConfig) -> Result<()> {
        at_least_one("head_rows", memory.head_rows)
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.head_rows = memory.head_rows;
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        at_least_one_in_plan("head_rows", plan.head_rows)
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        (used.memory.head_rows < request.memory.head_rows).then_some("the head takes fewer rows at a time")
    }

    fn examples(&self) -> &'static [&'static str] {
        &["head_rows: 128"]
    }
}
