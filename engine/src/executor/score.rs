//! Scores of sequences in their own order, whatever micro-batches they are cut into.

use super::segment_executor::Executor;
use crate::Result;
use crate::batch::{Batch, MicroBatchLimits};
use crate::objective::MicroScores;
use crate::sequence::Sequence;
use firebrick_models::Decoder;

/// Log-probs and entropies of sequences, in their order, in micro-batches under the budget.
pub fn score_all(
    executor: &Executor<'_>,
    decoder: &Decoder,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
) -> Result<MicroScores> {
    let mut scores = MicroScores {
        logp: vec![Vec::new(); sequences.len()],
        entropy: vec![Vec::new(); sequences.len()],
        values: vec![Vec::new(); sequences.len()],
        routes: vec![None; sequences.len()],
    };
    let batch = Batch::pack(sequences, cut)?;
    let scored = executor.score(decoder, &batch.micros())?;
    for (indices, own) in batch.indices().iter().zip(scored) {
        let both = own.logp.into_iter().zip(own.entropy);
        for (&i, (logp, entropy)) in indices.iter().zip(both) {
            scores.logp[i] = logp;
            scores.entropy[i] = entropy;
        }
        for (&i, routes) in indices.iter().zip(own.routes) {
            scores.routes[i] = routes;
        }
        for (&i, values) in indices.iter().zip(own.values) {
            scores.values[i] = values;
        }
    }
    Ok(scores)
}

/// A critic's values of sequences' scored tokens, in their order, in micro-batches under the budget.
pub fn values_all(
    executor: &Executor<'_>,
    critic: &Decoder,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
) -> Result<Vec<Vec<f32>>> {
    let mut all = vec![Vec::new(); sequences.len()];
    let batch = Batch::pack(sequences, cut)?;
    let values = executor.values(critic, &batch.micros())?;
    for (indices, own) in batch.indices().iter().zip(values) {
        for (&i, values) in indices.iter().zip(own) {
            all[i] = values;
        }
    }
    Ok(all)
}
