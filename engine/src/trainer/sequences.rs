//! Rollouts as the sequences of a pass or of an optimizer step.

use crate::rollout::Rollout;
use crate::sequence::{SampleId, Sequence};

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
    Sequence {
        positions: rollout.scored(&whole.positions),
        advantages: rollout.scored(&rollout.advantages),
        old_logp: rollout.scored(rollout.old()),
        ref_logp: rollout
            .ref_logp
            .as_deref()
            .map_or_else(Vec::new, |l| rollout.scored(l)),
        sampler_logp: rollout.scored(&rollout.sampler_logp),
        correction: rollout.correction.clone(),
        values: rollout.scored(&rollout.values),
        returns: rollout.scored(&rollout.returns),
        id: SampleId {
            prompt_index: rollout.prompt_index,
            sample: rollout.sample,
        },
        ..whole
    }
}
