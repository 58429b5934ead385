//! Distribution of prompts among ranks, and collection of completions and rollouts on every rank, in the order of the
//! prompts.

use crate::Result;
use crate::data::Prompt;
use crate::metrics::{ProgramStats, RolloutStats};
use crate::rollout::Rollout;
use crate::task::Example;
use crate::turns::{Outcome, TurnStats};
use crate::world::World;
use crate::world::deal::contiguous;
use firebrick_models::random::DrawKey;
use firebrick_sampler::{GenerationRequest, GenerationStats, Sample};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// This rank's share of a list of prompts. Ranks of one sampling group generate from the same prompts and split the
/// scoring.
pub(super) struct PromptShard {
    /// Prompts that it samples from.
    pub sampled: Range<usize>,
    /// Prompts whose completions it scores and sends to the others, counted from the start of `sampled`.
    scored: Range<usize>,
    /// True on the rank that reports the counts of its sampling group.
    counts: bool,
}

impl PromptShard {
    /// Consecutive whole groups of about equal expected work: tokens of the prompt, which is prefilled once, plus
    /// `completions` tokens of a group.
    pub fn new(world: &World, prompts: impl Iterator<Item = usize>, completions: usize) -> Self {
        let costs: Vec<u64> = prompts.map(|tokens| (tokens + completions) as u64).collect();
        let groups = contiguous(&costs, world.sampling_groups());
        let sampled = groups[world.sampling_group()].clone();
        let parts = contiguous(&costs[sampled.clone()], world.sampling_size());
        Self { scored: parts[world.sampling_rank()].clone(), sampled, counts: world.sampling_rank() == 0 }
    }

    /// Returns true if this rank scores a completion.
    pub fn scores(&self, sample: &Sample) -> bool {
        self.scored.contains(&sample.request)
    }

    /// Statistics that this rank contributes: only its times, if another rank of its group reports the counts.
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

/// Requests for completions of prompts; `first` is the index of the first.
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
    /// Its prompts with additions of environments, if there are environments.
    #[serde(with = "firebrick_models::shared")]
    pub prompts: Option<Arc<Vec<Prompt>>>,
    /// Statistics of turns, with environments.
    pub turns: Option<TurnStats>,
    pub seconds: f64,
}

/// Completions of all prompts, from those that each rank has sampled.
pub(super) fn all_samples(world: &World, shard: &PromptShard, samples: Vec<Sample>) -> Result<Vec<Sample>> {
    if world.is_solo() {
        return Ok(samples);
    }
    let scored = samples.into_iter().filter(|sample| shard.scores(sample));
    let renumbered: Vec<Sample> =
        scored.map(|sample| Sample { request: shard.sampled.start + sample.request, ..sample }).collect();
    Ok(world.gather::<Vec<Sample>>(&renumbered)?.concat())
}

/// Rewards of all ranks by name, in the order of completions. All ranks have the same names.
pub(super) fn all_values(world: &World, rewards: Vec<(String, Vec<f64>)>) -> Result<Vec<(String, Vec<f64>)>> {
    if world.is_solo() || rewards.is_empty() {
        return Ok(rewards);
    }
    let (names, values): (Vec<String>, Vec<Vec<f64>>) = rewards.into_iter().unzip();
    let ranks = world.gather::<Vec<Vec<f64>>>(&values)?;
    let values = |place: usize| ranks.iter().flat_map(|rank| &rank[place]).copied().collect();
    Ok(names.into_iter().enumerate().map(|(place, name)| (name, values(place))).collect())
}

/// All prompts as they were sampled from, and the rollouts of all ranks; adds counts and times to the step's
/// statistics.
pub(super) fn all_rollouts(
    world: &World,
    prompts: &Arc<Vec<Prompt>>,
    rollouts: RankRollouts,
    stats: &mut RolloutStats,
) -> Result<(Arc<Vec<Prompt>>, Vec<Rollout>)> {
    let ranks = if world.is_solo() { vec![rollouts] } else { world.gather::<RankRollouts>(&rollouts)? };
    let mut step = GenerationStats::default();
    for rank in &ranks {
        step.add(&rank.engine);
        if let Some(programs) = rank.programs {
            let total = stats.programs.get_or_insert_default();
            // ranks wait for their programs at the same time
            total.wait_seconds = total.wait_seconds.max(programs.wait_seconds);
            total.repeated += programs.repeated;
            total.lost += programs.lost;
        }
        if let Some(turns) = &rank.turns {
            stats.turns.get_or_insert_default().absorb(turns);
        }
    }
    // ranks sample at the same time: rates are those of all together
    let longest = |of: fn(&GenerationStats) -> Duration| ranks.iter().map(|rank| of(&rank.engine)).max();
    step.prefill_time = longest(|s| s.prefill_time).unwrap_or_default();
    step.decode_time = longest(|s| s.decode_time).unwrap_or_default();
    stats.engine.add(&step);
    if !world.is_solo() {
        let last = ranks.iter().map(|rank| rank.seconds).fold(0.0, f64::max);
        stats.ranks.get_or_insert_default().add(ranks.iter().map(|rank| last - rank.seconds));
    }
    let prompts = all_prompts(prompts, &ranks);
    let rollouts = ranks.into_iter().flat_map(|rank| rank.rollouts).collect();
    Ok((prompts, rollouts))
}

/// A step's prompts with the additions of the environments of all ranks.
fn all_prompts(prompts: &Arc<Vec<Prompt>>, ranks: &[RankRollouts]) -> Arc<Vec<Prompt>> {
    let sampled: Vec<_> = ranks.iter().filter_map(|rank| rank.prompts.as_ref()).collect();
    match sampled[..] {
        [] => Arc::clone(prompts),
        [only] => Arc::clone(only),
        _ => Arc::new(with_additions(prompts, sampled.iter().flat_map(|rank| rank.iter()))),
    }
}

/// Validation prompts with the additions of the environments of all ranks, and the outcomes of their completions.
pub(super) fn all_outcomes(
    world: &World,
    prompts: &[Prompt],
    session: (Vec<Prompt>, Vec<Outcome>),
) -> Result<(Vec<Prompt>, Vec<Outcome>)> {
    if world.is_solo() {
        return Ok(session);
    }
    let ranks = world.gather::<(Vec<Prompt>, Vec<Outcome>)>(&session)?;
    let (sampled, outcomes): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    let sampled = with_additions(prompts, sampled.iter().flatten());
    let mut outcomes = outcomes.concat();
    let n = outcomes.len() / prompts.len().max(1);
    for (at, outcome) in outcomes.iter_mut().enumerate() {
        if let Some(prompt) = &mut outcome.prompt {
            *prompt = Arc::new(with_addition(&prompts[at / n], prompt));
        }
    }
    Ok((sampled, outcomes))
}

/// Prompts with the texts and tokens that ranks sampled from.
fn with_additions<'p>(prompts: &[Prompt], sampled: impl IntoIterator<Item = &'p Prompt>) -> Vec<Prompt> {
    prompts.iter().zip(sampled).map(|(prompt, sampled)| with_addition(prompt, sampled)).collect()
}

fn with_addition(prompt: &Prompt, sampled: &Prompt) -> Prompt {
    let example = Example { prompt: sampled.example.prompt.clone(), ..prompt.example.clone() };
    Prompt { example, row: prompt.row, ..sampled.clone() }
}
