//! Logits: of one chunk of tokens at a time, and none of a critic.

use super::{arch, held, total, under, unshared};
use crate::MemoryConfig;
use crate::estimate::{CriticWork, EstimatePhase, Workload};
use crate::test_support::device;
use firebrick_spec::{Backend, Category};

/// A vocabulary that outweighs the rest, in micro-batches of two sequences, half of whose tokens are scored.
fn large_vocabulary() -> Workload {
    let policy = arch(32_000);
    Workload {
        critic: Some(CriticWork { arch: policy.clone().with_value_head(), clips: true, starts_from_policy: true }),
        ..Workload::grpo(policy, [256, 256], 8, 8)
    }
}

#[test]
fn logits_of_one_chunk_are_there_at_a_time() {
    let head = |head_rows| {
        let memory = MemoryConfig { head_rows, train_tokens: 1024, ..unshared() };
        let estimate = under(&large_vocabulary(), &memory, &device(Backend::Cpu));
        held(&estimate, EstimatePhase::Backward, Category::Head)
    };
    assert!(head(512) >= 4 * 512 * 32_000);
    assert_eq!(head(512), 2 * head(256));
    // no more than 512 tokens are scored
    assert_eq!(head(1024), head(512));
}

#[test]
fn the_head_of_a_critic_holds_no_logits() {
    let memory = MemoryConfig { train_tokens: 1024, ..unshared() };
    let estimate = under(&large_vocabulary(), &memory, &device(Backend::Cpu));
    let (policy, critic) = (
        held(&estimate, EstimatePhase::Backward, Category::Head),
        held(&estimate, EstimatePhase::CriticBackward, Category::Head),
    );
    assert!(policy > 20 * critic, "{policy} and {critic}");
    assert!(total(&estimate, EstimatePhase::CriticBackward) < total(&estimate, EstimatePhase::Backward));
}
