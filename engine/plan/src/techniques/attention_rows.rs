//! Chunks of attention scores.

use super::down;
use crate::technique::prelude::*;

/// Queries that the planner tries, the most first; 0 is all of them, and so is any number from the length on.
pub(crate) fn attention_rows(most: usize, length: u64) -> Vec<usize> {
    let below = |rows: &usize| (*rows as u64) < length;
    let steps: Vec<usize> = [512, 256, 128, 64].into_iter().filter(below).collect();
    if most == 0 || !below(&most) {
        return std::iter::once(most).chain(steps).collect();
    }
    down(most, &steps)
}

pub(crate) struct AttentionRows;

impl Technique for AttentionRows {
    fn about(&self) -> About {
        About { keys: &["memory.attention_rows"], kind: TechniqueKind::Set, examples: &[] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.attention_rows = memory.attention_rows;
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let rows = used.memory.attention_rows;
        (rows != request.memory.attention_rows && rows > 0).then_some("attention takes fewer queries at a time")
    }
}

#[cfg(test)]
mod tests {
    use super::attention_rows;

    #[test]
    fn rows_at_or_above_the_length_are_all_of_them() {
        assert_eq!(attention_rows(512, 512), [512, 256, 128, 64]);
        assert_eq!(attention_rows(256, 512), [256, 128, 64]);
        assert_eq!(attention_rows(0, 100), [0, 64]);
    }
}
