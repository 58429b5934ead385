//! Completions and rollouts of all ranks, put together on every rank in the order of their prompts.

use crate::Result;
use crate::metrics::{ProgramStats, RankWaits, RolloutStats};
use crate::rollout::Rollout;
use crate::rollout::wire::{read_rollout, read_sample, write_rollout, write_sample};
use crate::world::World;
use crate::world::codec::{Reader, Writer};
use crate::world::deal::in_order;
use firebrick_models::generate::{GenerationStats, Sample};
use std::ops::Range;
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

/// What a rank sampled and judged of a step, and the seconds that it took.
pub(super) struct OwnRollouts {
    pub rollouts: Vec<Rollout>,
    pub engine: GenerationStats,
    pub programs: Option<ProgramStats>,
    pub seconds: f64,
}

/// Rollouts of all ranks; their counts and times are added to the step's.
pub(super) fn all_rollouts(
    world: &World,
    own: OwnRollouts,
    stats: &mut RolloutStats,
) -> Result<Vec<Rollout>> {
    if world.is_solo() {
        stats.engine.add(&own.engine);
        add_programs(stats, own.programs);
        return Ok(own.rollouts);
    }
    let write = |w: &mut Writer| {
        w.list(own.rollouts.iter(), write_rollout);
        write_stats(w, &own.engine);
        w.option(own.programs, write_programs);
        w.float(own.seconds);
    };
    let all = world.gather(write, |r| {
        Ok(OwnRollouts {
            rollouts: r.list(read_rollout)?,
            engine: read_stats(r)?,
            programs: r.option(read_programs)?,
            seconds: r.float()?,
        })
    })?;
    let mut step = GenerationStats::default();
    for rank in &all {
        step.add(&rank.engine);
        add_programs(stats, rank.programs);
    }
    // ranks sample at the same time: rates are those of all of them together
    let longest =
        |of: fn(&GenerationStats) -> Duration| all.iter().map(|rank| of(&rank.engine)).max();
    step.prefill_time = longest(|s| s.prefill_time).unwrap_or_default();
    step.decode_time = longest(|s| s.decode_time).unwrap_or_default();
    stats.engine.add(&step);
    let last = all.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
    let waits = stats.ranks.get_or_insert_with(RankWaits::default);
    waits.add(all.iter().map(|rank| last - rank.seconds));
    Ok(all.into_iter().flat_map(|rank| rank.rollouts).collect())
}

/// Adds what other programs' rewards cost: ranks wait for theirs at the same time.
fn add_programs(stats: &mut RolloutStats, own: Option<ProgramStats>) {
    let Some(own) = own else { return };
    let all = stats.programs.get_or_insert_default();
    all.wait_seconds = all.wait_seconds.max(own.wait_seconds);
    all.lost += own.lost;
}

fn write_programs(to: &mut Writer, programs: ProgramStats) {
    to.float(programs.wait_seconds);
    to.number(programs.lost as u64);
}

fn read_programs(from: &mut Reader<'_>) -> Result<ProgramStats> {
    Ok(ProgramStats {
        wait_seconds: from.float()?,
        lost: from.count()?,
    })
}

/// Every field once, in its order: for writing and for reading.
macro_rules! counts {
    ($($field:ident)+) => {
        fn write_stats(to: &mut Writer, stats: &GenerationStats) {
            // a new field has to be listed
            let GenerationStats { $($field,)+ prefill_time, decode_time } = stats;
            $(to.number(*$field as u64);)+
            to.float(prefill_time.as_secs_f64());
            to.float(decode_time.as_secs_f64());
        }

        fn read_stats(from: &mut Reader<'_>) -> Result<GenerationStats> {
            Ok(GenerationStats {
                $($field: from.count()?,)+
                prefill_time: Duration::from_secs_f64(from.float()?),
                decode_time: Duration::from_secs_f64(from.float()?),
            })
        }
    };
}

counts! {
    prefill_tokens recomputed_tokens new_tokens decode_steps graph_replays occupied slots overrun preemptions preempted
    prefix_cache_hits cache_bytes peak_cache_bytes peak_blocks block_slots unused_slots blocks unshared_blocks
}
