//! Scores of sequences in their order, for any division into micro-batches and ranks.

use super::segment_executor::Executor;
use super::uneven_inputs::rounds;
use crate::batch::{Batch, MicroBatchLimits};
use firebrick_core::Result;
use firebrick_core::sequence::Sequence;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_objectives::MicroScores;
use firebrick_plan::Zero;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Log-probs and entropies of sequences, in their order, in micro-batches under the budget.
///
/// # Errors
/// `Error::Budget` for a sequence longer than the budget; `Error::Ranks` where ranks cannot share the sequences of this
/// model; `Error::OutOfMemory` above `memory.limit`; `Error::Model` and `Error::Device` where the device, a copy or
/// another rank fails.
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
    let world = executor.runtime().world();
    let batch = Batch::pack_for(sequences, cut, world.data_size())?;
    let executor = in_rounds(executor, &batch);
    let scored = shared(world, &batch, |micros| executor.score(decoder, micros))?;
    for (indices, micro) in batch.indices().iter().zip(scored) {
        let scores_of_tokens = micro.logp.into_iter().zip(micro.entropy);
        for (&i, (logp, entropy)) in indices.iter().zip(scores_of_tokens) {
            scores.logp[i] = logp;
            scores.entropy[i] = entropy;
        }
        for (&i, routes) in indices.iter().zip(micro.routes) {
            scores.routes[i] = routes;
        }
        for (&i, values) in indices.iter().zip(micro.values) {
            scores.values[i] = values;
        }
    }
    Ok(scores)
}

/// A critic's values of sequences' scored tokens, in their order, in micro-batches under the budget.
///
/// # Errors
/// As [`score_all`].
pub fn values_all(
    executor: &Executor<'_>,
    critic: &Decoder,
    sequences: &[Sequence],
    cut: MicroBatchLimits,
) -> Result<Vec<Vec<f32>>> {
    let mut placed = vec![Vec::new(); sequences.len()];
    let world = executor.runtime().world();
    let batch = Batch::pack_for(sequences, cut, world.data_size())?;
    let executor = in_rounds(executor, &batch);
    let values = shared(world, &batch, |micros| executor.values(critic, micros))?;
    for (indices, micro) in batch.indices().iter().zip(values) {
        for (&i, values) in indices.iter().zip(micro) {
            placed[i] = values;
        }
    }
    Ok(placed)
}

/// The executor with as many passes as every rank makes, where each of them gathers weights.
fn in_rounds<'e>(executor: &Executor<'e>, batch: &Batch<'_>) -> Executor<'e> {
    let dealt = batch.deal(executor.runtime().world().data_size());
    executor.with_rounds(rounds(executor.plan, &dealt, Zero::Stage3))
}

/// Scores of a micro-batch, which ranks exchange.
trait Scored: Serialize + DeserializeOwned {
    /// Adds what the next rank has of the same sequences.
    fn append(&mut self, next: Self);
}

impl Scored for Vec<Vec<f32>> {
    fn append(&mut self, next: Self) {
        self.iter_mut().zip(next).for_each(|(values, next)| values.extend(next));
    }
}

impl Scored for MicroScores {
    fn append(&mut self, next: Self) {
        Scored::append(&mut self.logp, next.logp);
        Scored::append(&mut self.entropy, next.entropy);
        Scored::append(&mut self.values, next.values);
        for (routes, next) in self.routes.iter_mut().zip(next.routes) {
            if let (Some(routes), Some(next)) = (routes, next) {
                routes.append(next);
            }
        }
    }
}

/// The results of a batch's micro-batches, in their order: each rank scores those that it is dealt, and has those of
/// all.
fn shared<T: Scored>(
    world: &World,
    batch: &Batch<'_>,
    score: impl FnOnce(&[Vec<&Sequence>]) -> Result<Vec<T>>,
) -> Result<Vec<T>> {
    let micros = batch.micros();
    if world.is_solo() {
        return score(&micros);
    }
    let dealt = batch.deal(world.data_size());
    let assigned: Vec<_> = dealt[world.data_rank()].iter().map(|&i| micros[i].clone()).collect();
    let scored = score(&assigned)?;
    let gathered = world.gather::<Vec<T>>(&scored)?;
    // those of the last stage have the results
    let behind = gathered.len() - gathered.len() / world.stages();
    let mut results = gathered.into_iter().skip(behind);
    let mut placed: Vec<(usize, T)> = Vec::with_capacity(batch.indices().len());
    for micros in dealt {
        let group = world.sequence_size() * world.tensor_size();
        let mut parts = results.by_ref().take(group);
        let mut whole = parts.next().unwrap_or_default();
        if world.tensor_size() > 1 {
            // those that share matrices have the same results
            parts.by_ref().for_each(drop);
        }
        for part in parts {
            for (scores, next) in whole.iter_mut().zip(part) {
                scores.append(next);
            }
        }
        placed.extend(micros.into_iter().zip(whole));
    }
    placed.sort_by_key(|(micro, _)| *micro);
    Ok(placed.into_iter().map(|(_, one)| one).collect())
}
