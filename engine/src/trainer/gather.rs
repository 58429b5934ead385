//! Completions and rollouts of all ranks, put together on every rank in the order of their prompts.

use crate::Result;
use crate::data::Prompt;
use crate::metrics::{ProgramStats, RankWaits, RolloutStats};
use crate::rollout::Rollout;
use crate::rollout::wire::{
    read_json, read_rollout, read_sample, write_json, write_rollout, write_sample,
};
use crate::task::{Example, PromptText};
use crate::turns::{Outcome, TurnStats};
use crate::world::World;
use crate::world::codec::{Reader, Writer};
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

/// What a rank sampled and judged of a step, and the seconds that it took.
pub(super) struct OwnRollouts {
    pub rollouts: Vec<Rollout>,
    pub engine: GenerationStats,
    pub programs: Option<ProgramStats>,
    /// Its prompts with what environments have added, and how their turns fared, where there are any.
    pub played: Option<(Arc<Vec<Prompt>>, TurnStats)>,
    pub seconds: f64,
}

/// All prompts as they were sampled from, and rollouts of all ranks; counts and times are added to the step's.
pub(super) fn all_rollouts(
    world: &World,
    prompts: &Arc<Vec<Prompt>>,
    own: OwnRollouts,
    stats: &mut RolloutStats,
) -> Result<(Arc<Vec<Prompt>>, Vec<Rollout>)> {
    if world.is_solo() {
        stats.engine.add(&own.engine);
        add_programs(stats, own.programs);
        let Some((prompts, turns)) = own.played else {
            return Ok((Arc::clone(prompts), own.rollouts));
        };
        stats.turns.get_or_insert_default().absorb(&turns);
        return Ok((prompts, own.rollouts));
    }
    let write = |w: &mut Writer| {
        w.list(own.rollouts.iter(), write_rollout);
        write_stats(w, &own.engine);
        w.option(own.programs, write_programs);
        w.option(own.played.as_ref(), |w, (prompts, turns)| {
            w.list(prompts.iter(), write_prompt);
            write_turns(w, turns);
        });
        w.float(own.seconds);
    };
    let all = world.gather(write, |r| {
        Ok(OwnRollouts {
            rollouts: r.list(read_rollout)?,
            engine: read_stats(r)?,
            programs: r.option(read_programs)?,
            played: r.option(|r| Ok((Arc::new(r.list(read_prompt)?), read_turns(r)?)))?,
            seconds: r.float()?,
        })
    })?;
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
    let last = all.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
    let waits = stats.ranks.get_or_insert_with(RankWaits::default);
    waits.add(all.iter().map(|rank| last - rank.seconds));
    let played = all.iter().filter_map(|rank| rank.played.as_ref());
    let played: Vec<&Prompt> = played.flat_map(|(prompts, _)| prompts.iter()).collect();
    let prompts = if played.is_empty() {
        Arc::clone(prompts)
    } else {
        Arc::new(with_answers(prompts, played))
    };
    let rollouts = all.into_iter().flat_map(|rank| rank.rollouts).collect();
    Ok((prompts, rollouts))
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
    let played = with_answers(prompts, played.iter().flatten());
    Ok((played, outcomes.concat()))
}

/// Prompts with the texts and tokens that they have on the ranks that sampled from them.
fn with_answers<'p>(
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

/// Writes what an environment may have added to.
fn write_prompt(to: &mut Writer, prompt: &Prompt) {
    match &prompt.example.prompt {
        PromptText::Text(text) => write_json(to, &(Some(text), None::<()>)),
        PromptText::Chat(messages) => write_json(to, &(None::<()>, Some(messages))),
    }
    to.text(&prompt.text);
    to.tokens(&prompt.tokens);
}

/// Reads it; nothing else of the row is there.
fn read_prompt(from: &mut Reader<'_>) -> Result<Prompt> {
    let mut example = Example::text("", "");
    example.prompt = match read_json(from)? {
        (Some(text), _) => PromptText::Text(text),
        (None, messages) => PromptText::Chat(Option::unwrap_or_default(messages)),
    };
    Ok(Prompt {
        example,
        text: from.text()?,
        tokens: from.tokens()?,
    })
}

fn write_outcome(to: &mut Writer, outcome: &Outcome) {
    // a new field has to be written and read here
    let Outcome {
        turns,
        reward,
        object,
        tool_calls,
        failed_calls,
        retries,
        lost,
        differs_from_template,
    } = outcome;
    write_json(to, turns);
    to.option(*reward, Writer::float);
    write_json(to, object);
    for count in [tool_calls, failed_calls, retries] {
        to.number(*count as u64);
    }
    to.option(lost.as_deref(), Writer::text);
    to.number(u64::from(*differs_from_template));
}

fn read_outcome(from: &mut Reader<'_>) -> Result<Outcome> {
    Ok(Outcome {
        turns: read_json(from)?,
        reward: from.option(Reader::float)?,
        object: read_json(from)?,
        tool_calls: from.count()?,
        failed_calls: from.count()?,
        retries: from.count()?,
        lost: from.option(Reader::text)?,
        differs_from_template: from.number()? != 0,
    })
}

fn write_turns(to: &mut Writer, stats: &TurnStats) {
    // a new field has to be written and read here
    let TurnStats {
        rollouts,
        tool_calls,
        failed_calls,
        retries,
        lost,
        differ_from_template,
    } = stats;
    for count in [
        rollouts,
        tool_calls,
        failed_calls,
        retries,
        lost,
        differ_from_template,
    ] {
        to.number(*count as u64);
    }
}

fn read_turns(from: &mut Reader<'_>) -> Result<TurnStats> {
    Ok(TurnStats {
        rollouts: from.count()?,
        tool_calls: from.count()?,
        failed_calls: from.count()?,
        retries: from.count()?,
        lost: from.count()?,
        differ_from_template: from.count()?,
    })
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
