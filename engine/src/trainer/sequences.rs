//! Rollouts as the sequences of a pass or of an optimizer step.

use crate::rollout::Rollout;
use crate::sequence::{SampleId, Sequence, TokenColumns};

/// Prompts and completions, all completion tokens scored.
pub(super) fn unmasked(rollouts: &[Rollout]) -> Vec<Sequence> {
    rollouts.iter().map(|r| Sequence::completion(&r.prompt, &r.completion)).collect()
}

/// Sequences of rollouts that go through the experts that they were sampled with.
pub(super) fn replayed<'r>(sequences: Vec<Sequence>, rollouts: impl IntoIterator<Item = &'r Rollout>) -> Vec<Sequence> {
    let pairs = sequences.into_iter().zip(rollouts);
    let own = pairs.map(|(sequence, rollout)| Sequence { routes: rollout.routes.clone(), ..sequence });
    own.collect()
}

/// The sequence of a rollout as the policy learns from it, its scored tokens being those of the mask.
pub(super) fn sequence(rollout: &Rollout) -> Sequence {
    let scored = rollout.columns.select(&rollout.mask);
    let old_logp = scored.old_logp.or_else(|| scored.full_logp.clone());
    let columns = TokenColumns { old_logp, sampler_logp: None, ..scored };
    masked(rollout, columns)
}

/// The sequence of a rollout as a critic learns from it: values and returns alone.
pub(super) fn critic_sequence(rollout: &Rollout) -> Sequence {
    let known = TokenColumns {
        value: rollout.columns.value.clone(),
        returns: rollout.columns.returns.clone(),
        ..TokenColumns::default()
    };
    masked(rollout, known.select(&rollout.mask))
}

/// A rollout's tokens with the columns of those that are scored.
fn masked(rollout: &Rollout, columns: TokenColumns<Vec<f64>>) -> Sequence {
    let whole = Sequence::completion(&rollout.prompt, &rollout.completion);
    Sequence {
        positions: rollout.scored(&whole.positions),
        columns,
        id: SampleId { prompt_index: rollout.prompt_index, sample: rollout.sample },
        ..whole
    }
}
