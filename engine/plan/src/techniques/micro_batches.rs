//! Sizes of micro-batches.

use crate::estimate::Tree;
use crate::technique::prelude::*;

/// Token budgets that hold whole sequences of a tree, up to `most` tokens and `sequences` of them.
pub(crate) fn tokens(most: usize, tree: Tree, sequences: u64) -> Vec<usize> {
    let most = tree.sequences_within(most as u64).min(sequences.max(1));
    let mut counts: Vec<u64> = std::iter::successors(Some(1), |n| Some(n * 2))
        .flat_map(|n| [n, n + n / 2])
        .take_while(|&n| n < most)
        .collect();
    counts.push(most);
    counts.dedup();
    counts.into_iter().map(|n| tree.rows(n) as usize).collect()
}

/// Rows of a device's share of `sequences` sequences in a layout.
fn share(request: &Request, tree: Tree, sequences: u64) -> u64 {
    tree.rows(request.parallel.sequences(sequences))
}

/// Micro-batches of training.
pub(crate) struct TrainTokens;

impl Technique for TrainTokens {
    fn about(&self) -> About {
        About { keys: &["memory.train_tokens", "memory.micro_batch_size"], kind: TechniqueKind::Set, examples: &[] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.train_tokens = memory.train_tokens;
        plan.micro_batch_size = memory.micro_batch_size;
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        at_least_one_in_plan("train_tokens", plan.train_tokens)
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let tree = request.workload.training_tree(used.memory.layout());
        let step = share(request, tree, request.workload.mini_rollouts());
        let most = step.min(request.memory.train_tokens as u64);
        ((used.memory.train_tokens as u64) < most).then_some("smaller training micro-batches")
    }
}

/// Micro-batches of forward passes without a graph.
pub(crate) struct ScoreTokens;

impl Technique for ScoreTokens {
    fn about(&self) -> About {
        About {
            keys: &["memory.score_tokens", "memory.reference.score_tokens"],
            kind: TechniqueKind::Set,
            examples: &[],
        }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.score_tokens = memory.score_tokens;
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        at_least_one_in_plan("score_tokens", plan.score_tokens)
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        let tree = request.workload.tree(used.memory.layout());
        let step = share(request, tree, request.workload.scored_sequences());
        let most = step.min(request.memory.score_tokens as u64);
        ((used.memory.score_tokens as u64) < most).then_some("smaller scoring micro-batches")
    }
}

#[cfg(test)]
mod tests {
    use super::{Tree, tokens};

    #[test]
    fn token_budgets_hold_whole_sequences_and_end_at_the_limit() {
        let alone = Tree::single(100);
        assert_eq!(tokens(1000, alone, 64), [100, 200, 300, 400, 600, 800, 1000]);
        assert_eq!(tokens(1000, alone, 3), [100, 200, 300]);
        assert_eq!(tokens(50, alone, 3), [100]);
        // a prompt of 80 tokens before 4 completions
        let tree = Tree { prefix: 80, members: 4, behind: 20 };
        assert_eq!(tokens(1000, tree, 8), [100, 120, 140, 160, 280, 320]);
        assert_eq!(tokens(150, tree, 8), [100, 120, 140]);
    }
}
