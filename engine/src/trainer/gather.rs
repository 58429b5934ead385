//! Completions and rollouts of all ranks, put together on every rank in the order of their prompts.

use super::wire::{OwnRollouts, read_outcome, read_prompt, write_outcome, write_prompt};
use crate::Result;
use crate::data::Prompt;
use crate::metrics::{ProgramStats, RankWaits, RolloutStats};
use crate::rollout::Rollout;
use crate::rollout::wire::{read_sample, write_sample};
use crate::task::Example;
use crate::turns::Outcome;
use crate::world::World;
use crate::world::codec::Reader;
use crate::world::deal::in_order;
use firebrick_models::generate::{GenerationStats, Sample};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The prompts that this rank samples from: whole groups, in their order, of about the same expected work. That is a prompt's tokens,
/// which are prefilled once, and as many completions as a group has, which are expected to be equally long.
pub(super) fn own_prompts(
    world: &World,
    prompts: impl Iterator<Item = usize>,
    completions: usize,
) -> Range<usize> {
    let costs: Vec<u64> = prompts
        .map(|tokens| (tokens + completions) as u64)
        .collect();
    in_order(&costs, world.size()).swap_remove(world.rank())
}

/// Completions of all prompts, where this rank has those of a part of them that begins at `start`.
pub(super) fn all_samples(world: &World, start: usize, own: Vec<Sample>) -> Result<Vec<Sample>> {
    if world.is_solo() {
        return Ok(own);
    }
    let placed = own.into_iter().map(|sample| Sample {
        request: start + sample.request,
        ..sample
    });
    let all = world.gather(
        |w| w.list(placed, |w, s| write_sample(w, &s)),
        |r| r.list(read_sample),
    )?;
    Ok(all.concat())
}

/// What rewards have given on all ranks, in the order of completions: every rank has the same rewards, with values of its own.
pub(super) fn all_values(
    world: &World,
    own: Vec<(String, Vec<f64>)>,
) -> Result<Vec<(String, Vec<f64>)>> {
    if world.is_solo() || own.is_empty() {
        return Ok(own);
    }
    let values = own.iter().map(|(_, values)| values);
    let all = world.gather(
        |w| w.list(values, |w, values| w.floats(values)),
        |r| r.list(Reader::floats),
    )?;
    let places = own.into_iter().enumerate();
    let joined = places.map(|(place, (name, _))| {
        let ranks = all.iter().flat_map(|rank| &rank[place]);
        (name, ranks.copied().collect())
    });
    Ok(joined.collect())
}

/// All prompts as they were sampled from, and rollouts of all ranks; counts and times are added to the step's.
pub(super) fn all_rollouts(
    world: &World,
    prompts: &Arc<Vec<Prompt>>,
    own: OwnRollouts,
    stats: &mut RolloutStats,
) -> Result<(Arc<Vec<Prompt>>, Vec<Rollout>)> {
    let all = gathered(world, own)?;
    let mut step = GenerationStats::default();
    for rank in &all {
        step.add(&rank.engine);
        add_programs(stats, rank.programs);
        if let Some((_, turns)) = &rank.played {
            stats.turns.get_or_insert_default().absorb(turns);
        }
    }
    // ranks sample at the same time: rates are those of all of them together
    let longest =
        |of: fn(&GenerationStats) -> Duration| all.iter().map(|rank| of(&rank.engine)).max();
    step.prefill_time = longest(|s| s.prefill_time).unwrap_or_default();
    step.decode_time = longest(|s| s.decode_time).unwrap_or_default();
    stats.engine.add(&step);
    if !world.is_solo() {
        let last = all.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        let waits = stats.ranks.get_or_insert_with(RankWaits::default);
        waits.add(all.iter().map(|rank| last - rank.seconds));
    }
    let prompts = all_prompts(prompts, &all);
    let rollouts = all.into_iter().flat_map(|rank| rank.rollouts).collect();
    Ok((prompts, rollouts))
}

/// What every rank sampled, in their order.
fn gathered(world: &World, own: OwnRollouts) -> Result<Vec<OwnRollouts>> {
    if world.is_solo() {
        return Ok(vec![own]);
    }
    world.gather(|w| own.write(w), OwnRollouts::read)
}

/// A step's prompts with what the environments of all ranks have added.
fn all_prompts(prompts: &Arc<Vec<Prompt>>, all: &[OwnRollouts]) -> Arc<Vec<Prompt>> {
    let played: Vec<_> = all.iter().filter_map(|rank| rank.played.as_ref()).collect();
    match played[..] {
        [] => Arc::clone(prompts),
        [(only, _)] => Arc::clone(only),
        _ => {
            let played = played.iter().flat_map(|(own, _)| own.iter());
            Arc::new(with_additions(prompts, played))
        }
    }
}

/// Validation prompts with what the environments of all ranks have added, and what came of their completions, in their order. This rank
/// has a part of both.
pub(super) fn all_played(
    world: &World,
    prompts: &[Prompt],
    own: (Vec<Prompt>, Vec<Outcome>),
) -> Result<(Vec<Prompt>, Vec<Outcome>)> {
    if world.is_solo() {
        return Ok(own);
    }
    let all = world.gather(
        |w| {
            w.list(own.0.iter(), write_prompt);
            w.list(own.1.iter(), write_outcome);
        },
        |r| Ok((r.list(read_prompt)?, r.list(read_outcome)?)),
    )?;
    let (played, outcomes): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let played = with_additions(prompts, played.iter().flatten());
    Ok((played, outcomes.concat()))
}

/// Prompts with the texts and tokens that they have on the ranks that sampled from them.
fn with_additions<'p>(
    prompts: &[Prompt],
    played: impl IntoIterator<Item = &'p Prompt>,
) -> Vec<Prompt> {
    let pairs = prompts.iter().zip(played);
    let both = pairs.map(|(own, played)| Prompt {
        example: Example {
            prompt: played.example.prompt.clone(),
            ..own.example.clone()
        },
        ..played.clone()
    });
    both.collect()
}

/// Adds what other programs' rewards cost: ranks wait for theirs at the same time.
fn add_programs(stats: &mut RolloutStats, own: Option<ProgramStats>) {
    let Some(own) = own else { return };
    let all = stats.programs.get_or_insert_default();
    all.wait_seconds = all.wait_seconds.max(own.wait_seconds);
    all.lost += own.lost;
}
