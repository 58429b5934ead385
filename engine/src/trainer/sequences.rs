//! Rollouts as the sequences of a pass or of an optimizer step.

use crate::rollout::Rollout;
use crate::sequence::{SampleId, Sequence, TokenColumns};

/// Prompts and completions, all completion tokens scored.
pub(super) fn unmasked(rollouts: &[Rollout]) -> Vec<Sequence> {
    rollouts
        .iter()
        .map(|r| Sequence::completion(&r.prompt, &r.completion))
        .collect()
}

/// The sequence of a rollout, its scored tokens being those of the mask.
pub(super) fn sequence(rollout: &Rollout) -> Sequence {
    let whole = Sequence::completion(&rollout.prompt, &rollout.completion);
    let scored = rollout.columns.select(&rollout.mask);
    Sequence {
        positions: rollout.scored(&whole.positions),
        columns: TokenColumns {
            old_logp: scored.old_logp.or(scored.full_logp),
            full_logp: None,
            ..scored
        },
        id: SampleId {
            prompt_index: rollout.prompt_index,
            sample: rollout.sample,
        },
        ..whole
    }
}

/// The sequence of a rollout as a critic learns from it: values and returns alone.
pub(super) fn critic_sequence(rollout: &Rollout) -> Sequence {
    let whole = sequence(rollout);
    Sequence {
        columns: TokenColumns {
            value: whole.columns.value,
            returns: whole.columns.returns,
            ..TokenColumns::default()
        },
        ..whole
    }
}
