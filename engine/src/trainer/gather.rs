//! Prompts dealt to the ranks, and their completions and rollouts put together on every rank in the order of the
//! prompts.

use crate::Result;
use crate::data::Prompt;
use crate::metrics::{ProgramStats, RankWaits, RolloutStats};
use crate::rollout::Rollout;
use crate::task::Example;
use crate::turns::{Outcome, TurnStats};
use crate::world::World;
use crate::world::deal::in_order;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, GenerationStats, Sample};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// This rank's share of a list of prompts. Ranks of one sampling group generate from the same prompts and split the
/// scoring.
pub(super) struct PromptShard {
    /// The prompts that it samples from.
    pub sampled: Range<usize>,
    /// Those of them whose completions are its own to judge and to give to the others, counted from the first that it
    /// samples from.
    judged: Range<usize>,
    /// Whether it speaks for those that it samples with.
    counts: bool,
}

impl PromptShard {
    /// Whole groups, in their order, of about the same expected work. That is a prompt's tokens, which are prefilled
    /// once, and as many completions as a group has, which are expected to be equally long.
    pub fn new(world: &World, prompts: impl Iterator<Item = usize>, completions: usize) -> Self {
        let costs: Vec<u64> = prompts.map(|tokens| (tokens + completions) as u64).collect();
        let groups = in_order(&costs, world.sampling_groups());
        let sampled = groups[world.sampling_group()].clone();
        let parts = in_order(&costs[sampled.clone()], world.sampling_size());
        Self { judged: parts[world.sampling_rank()].clone(), sampled, counts: world.sampling_rank() == 0 }
    }

    /// Whether a completion is this rank's own.
    pub fn judges(&self, sample: &Sample) -> bool {
        self.judged.contains(&sample.request)
    }

    /// What this rank adds to the counts of all: its times, where another rank has done the same.
    pub fn counted(&self, stats: GenerationStats) -> GenerationStats {
        if self.counts {
            return stats;
        }
        GenerationStats {
            prefill_time: stats.prefill_time,
            decode_time: stats.decode_time,
            ..GenerationStats::default()
        }
    }
}

/// The requests for completions of prompts, the first of which has this index.
pub(super) fn requests(prompts: &[Prompt], first: u64, key: impl Fn(u64) -> DrawKey) -> Vec<GenerationRequest> {
    let numbered = prompts.iter().zip(first..);
    let request = |(prompt, index): (&Prompt, u64)| GenerationRequest {
        tokens: prompt.tokens.clone(),
        key: key(index),
        max_new_tokens: None,
    };
    numbered.map(request).collect()
}

/// Rollouts that a rank sampled and scored in a step, with seconds.
#[derive(Deserialize, Serialize)]
pub(super) struct RankRollouts {
    pub rollouts: Vec<Rollout>,
    pub engine: GenerationStats,
    pub programs: Option<ProgramStats>,
    /// Its prompts with what environments have added, where there are any.
    #[serde(with = "firebrick_models::shared")]
    pub played: Option<Arc<Vec<Prompt>>>,
    /// How the turns of its environments fared.
    pub turns: Option<TurnStats>,
    pub seconds: f64,
}

/// Completions of all prompts, where this rank has sampled those that it was dealt.
pub(super) fn all_samples(world: &World, dealt: &PromptShard, own: Vec<Sample>) -> Result<Vec<Sample>> {
    if world.is_solo() {
        return Ok(own);
    }
    let own = own.into_iter().filter(|sample| dealt.judges(sample));
    let placed: Vec<Sample> =
        own.map(|sample| Sample { request: dealt.sampled.start + sample.request, ..sample }).collect();
    Ok(world.gather::<Vec<Sample>>(&placed)?.concat())
}

/// What rewards have given on all ranks, in the order of completions: every rank has the same rewards, with values of
/// its own.
pub(super) fn all_values(world: &World, own: Vec<(String, Vec<f64>)>) -> Result<Vec<(String, Vec<f64>)>> {
    if world.is_solo() || own.is_empty() {
        return Ok(own);
    }
    let values: Vec<&Vec<f64>> = own.iter().map(|(_, values)| values).collect();
    let all = world.gather::<Vec<Vec<f64>>>(&values)?;
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
    own: RankRollouts,
    stats: &mut RolloutStats,
) -> Result<(Arc<Vec<Prompt>>, Vec<Rollout>)> {
    let all = if world.is_solo() { vec![own] } else { world.gather::<RankRollouts>(&own)? };
    let mut step = GenerationStats::default();
    for rank in &all {
        step.add(&rank.engine);
        add_programs(stats, rank.programs);
        if let Some(turns) = &rank.turns {
            stats.turns.get_or_insert_default().absorb(turns);
        }
    }
    // ranks sample at the same time: rates are those of all of them together
    let longest = |of: fn(&GenerationStats) -> Duration| all.iter().map(|rank| of(&rank.engine)).max();
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

/// A step's prompts with what the environments of all ranks have added.
fn all_prompts(prompts: &Arc<Vec<Prompt>>, all: &[RankRollouts]) -> Arc<Vec<Prompt>> {
    let played: Vec<_> = all.iter().filter_map(|rank| rank.played.as_ref()).collect();
    match played[..] {
        [] => Arc::clone(prompts),
        [only] => Arc::clone(only),
        _ => {
            let played = played.iter().flat_map(|own| own.iter());
            Arc::new(with_additions(prompts, played))
        }
    }
}

/// Validation prompts with what the environments of all ranks have added, and what came of their completions, in their
/// order. This rank has a part of both.
pub(super) fn all_played(
    world: &World,
    prompts: &[Prompt],
    own: (Vec<Prompt>, Vec<Outcome>),
) -> Result<(Vec<Prompt>, Vec<Outcome>)> {
    if world.is_solo() {
        return Ok(own);
    }
    let all = world.gather::<(Vec<Prompt>, Vec<Outcome>)>(&own)?;
    let (played, outcomes): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let played = with_additions(prompts, played.iter().flatten());
    let mut outcomes = outcomes.concat();
    let n = outcomes.len() / prompts.len().max(1);
    for (at, outcome) in outcomes.iter_mut().enumerate() {
        if let Some(prompt) = &mut outcome.prompt {
            *prompt = Arc::new(with_addition(&prompts[at / n], prompt));
        }
    }
    Ok((played, outcomes))
}

/// Prompts with the texts and tokens that they have on the ranks that sampled from them.
fn with_additions<'p>(prompts: &[Prompt], played: impl IntoIterator<Item = &'p Prompt>) -> Vec<Prompt> {
    prompts.iter().zip(played).map(|(own, played)| with_addition(own, played)).collect()
}

fn with_addition(own: &Prompt, played: &Prompt) -> Prompt {
    let example = Example { prompt: played.example.prompt.clone(), ..own.example.clone() };
    Prompt { example, row: own.row, ..played.clone() }
}

/// Adds what other programs' rewards cost: ranks wait for theirs at the same time.
fn add_programs(stats: &mut RolloutStats, own: Option<ProgramStats>) {
    let Some(own) = own else { return };
    let all = stats.programs.get_or_insert_default();
    all.wait_seconds = all.wait_seconds.max(own.wait_seconds);
    all.repeated += own.repeated;
    all.lost += own.lost;
}
