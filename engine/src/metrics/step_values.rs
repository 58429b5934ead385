//! Values of metrics, from the facts of a step.

use super::expert_load::ExpertLoad;
use super::phase::Phase;
use super::report::{RolloutReport, RolloutStats, StepReport, UpdateReport};
use crate::batch::BatchStats;
use crate::objective::value::explained_variance;
use crate::rollout::Rollout;
use crate::sequence::TokenColumns;
use crate::turns::TurnStats;
use firebrick_sampler::{FinishReason, GenerationStats};
use std::collections::BTreeMap;

/// Values by the variable part of a metric's name.
type Named = Vec<(String, f64)>;

pub(super) fn actor(report: &StepReport) -> Option<&UpdateReport> {
    report.actor.as_ref()
}

pub(super) fn critic(report: &StepReport) -> Option<&UpdateReport> {
    report.critic.as_ref()
}

pub(super) fn stats(report: &StepReport) -> Option<&RolloutStats> {
    report.rollout.as_ref().map(|rollout| &rollout.stats)
}

pub(super) fn engine(report: &StepReport) -> Option<&GenerationStats> {
    stats(report).map(|stats| &stats.engine)
}

pub(super) fn turns(report: &StepReport) -> Option<&TurnStats> {
    stats(report)?.turns.as_ref()
}

fn rollouts(report: &StepReport) -> &[Rollout] {
    report.rollout.as_ref().map_or(&[], |rollout| &rollout.rollouts)
}

/// Mean, maximum and minimum of values; nothing without values.
pub(super) fn spread(values: &[f64]) -> Named {
    let Some(mean) = some_mean(values) else { return Vec::new() };
    let fold = |from, pick: fn(f64, f64) -> f64| values.iter().copied().fold(from, pick);
    let spread = [("mean", mean), ("max", fold(f64::NEG_INFINITY, f64::max)), ("min", fold(f64::INFINITY, f64::min))];
    spread.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Mean of values; `None` without values.
pub(super) fn some_mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Maximum of nonnegative values; `None` without values.
pub(super) fn largest(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().copied().fold(0.0, f64::max))
}

pub(super) fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

pub(super) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// Number of rollouts with a property.
pub(super) fn count(report: &StepReport, has: fn(&Rollout) -> bool) -> Option<f64> {
    report.rollout.as_ref().map(|sampled| sampled.rollouts.iter().filter(|rollout| has(rollout)).count() as f64)
}

pub(super) fn lengths(report: &StepReport, value: fn(&Rollout) -> usize) -> Vec<f64> {
    rollouts(report).iter().map(|rollout| value(rollout) as f64).collect()
}

pub(super) fn rewards(report: &StepReport, value: fn(&Rollout) -> Option<f64>) -> Vec<f64> {
    rollouts(report).iter().filter_map(value).collect()
}

/// Values of each reward in the completions to which it applies, by name.
fn reward_parts(report: &StepReport) -> impl Iterator<Item = (&String, Vec<f64>)> {
    let rollouts = rollouts(report);
    let names = rollouts.first().map_or(&[][..], |rollout| &rollout.reward_parts);
    names.iter().enumerate().map(move |(place, (name, _))| {
        let values = rollouts.iter().filter_map(|rollout| rollout.reward_parts.get(place).map(|(_, value)| *value));
        (name, values.filter(|value| !value.is_nan()).collect())
    })
}

pub(super) fn reward_means(report: &StepReport) -> Named {
    reward_parts(report).filter_map(|(name, values)| Some((name.clone(), some_mean(&values)?))).collect()
}

pub(super) fn missing_rewards(report: &StepReport) -> Named {
    let count = rollouts(report).len();
    reward_parts(report).map(|(name, values)| (name.clone(), (count - values.len()) as f64)).collect()
}

pub(super) fn running_statistics(report: &StepReport) -> Named {
    let running = report.rollout.as_ref().map(|rollout| &rollout.reward_stats);
    let named = reward_parts(report).filter_map(|(name, _)| Some((name, running?.get(name)?)));
    named
        .flat_map(|(name, statistics)| {
            [("mean", statistics.mean), ("std", statistics.std())].map(|(of, v)| (format!("{name}/running_{of}"), v))
        })
        .collect()
}

/// Means of the numbers and booleans that rewards return besides their value.
pub(super) fn extra_means(report: &StepReport) -> Named {
    let mut extra: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, value) in rollouts(report).iter().flat_map(|rollout| &rollout.reward_extra) {
        let truth = value.as_bool().map(|truth| f64::from(u8::from(truth)));
        if let Some(number) = value.as_f64().or(truth) {
            extra.entry(name).or_default().push(number);
        }
    }
    extra.into_iter().filter_map(|(name, values)| Some((name.to_owned(), some_mean(&values)?))).collect()
}

/// A column of all scored tokens.
pub(super) fn scored(report: &StepReport, of: fn(&TokenColumns<Vec<f64>>) -> &Option<Vec<f64>>) -> Vec<f64> {
    let rollouts = rollouts(report).iter();
    rollouts.flat_map(|rollout| of(&rollout.columns).iter().flat_map(|column| rollout.scored(column))).collect()
}

/// Returns of scored tokens, in a step with values.
pub(super) fn returns(report: &StepReport) -> Vec<f64> {
    let has_values = !scored(report, |columns| &columns.value).is_empty();
    if has_values { scored(report, |columns| &columns.returns) } else { Vec::new() }
}

pub(super) fn explained(report: &StepReport) -> Option<f64> {
    let values = scored(report, |columns| &columns.value);
    (!values.is_empty()).then(|| explained_variance(&values, &returns(report)))
}

/// Absolute differences between sampler and trainer in the probabilities of sampled tokens.
pub(super) fn probability_differences(report: &StepReport) -> Vec<f64> {
    let of_rollout = |rollout: &Rollout| -> Vec<f64> {
        let columns = &rollout.columns;
        let pairs = columns.full_logp.iter().flatten().zip(columns.old_logp.iter().flatten());
        let sampled = pairs.zip(rollout.sampled()).filter(|(_, sampled)| *sampled);
        sampled.map(|((sampler, trainer), _)| (sampler.exp() - trainer.exp()).abs()).collect()
    };
    rollouts(report).iter().flat_map(of_rollout).collect()
}

pub(super) fn truncated_share(report: &StepReport) -> Option<f64> {
    let cut = count(report, |rollout| rollout.finish == FinishReason::Length)?;
    Some(cut / rollouts(report).len() as f64)
}

pub(super) fn rerouted_share(report: &StepReport) -> Option<f64> {
    let compared = rollouts(report).iter().filter_map(|rollout| rollout.rerouted);
    let [tokens, others] =
        compared.fold([0, 0], |[tokens, others], routes| [tokens + routes.tokens, others + routes.others]);
    (tokens > 0).then(|| others as f64 / tokens as f64)
}

pub(super) fn left_out_groups(report: &StepReport) -> Option<f64> {
    let stats = stats(report)?;
    (stats.programs.is_some() || stats.turns.is_some()).then_some(stats.left_out_groups as f64)
}

pub(super) fn expert_loads(report: &StepReport) -> Named {
    let load = stats(report).and_then(|stats| stats.experts);
    let named =
        |ExpertLoad { max, min, .. }| [("expert_load_max".to_owned(), max), ("expert_load_min".to_owned(), min)];
    load.into_iter().flat_map(named).collect()
}

/// Values of `timing_s/rank_wait/max` and `timing_s/rank_wait/mean`.
pub(super) fn rank_waits(report: &StepReport) -> Named {
    let waits = stats(report).and_then(|stats| stats.ranks);
    waits
        .into_iter()
        .flat_map(|waits| [("max".into(), waits.max_seconds), ("mean".into(), waits.mean_seconds)])
        .collect()
}

/// A value of the micro-batches of the policy's and the critic's update.
pub(super) fn batches(report: &StepReport, name: &str, of: fn(&BatchStats) -> f64) -> Named {
    let updates = [("", actor(report)), ("critic_", critic(report))];
    let named = updates.into_iter().filter_map(|(model, update)| Some((format!("{model}{name}"), &update?.batch)));
    named.map(|(name, batch)| (name, of(batch))).collect()
}

/// Milliseconds of a phase per token.
pub(super) fn ms_per_token(report: &StepReport, phase: Phase, tokens: fn(&RolloutReport) -> usize) -> Option<f64> {
    Some(report.timings.seconds(phase) * 1e3 / tokens(report.rollout.as_ref()?).max(1) as f64)
}

pub(super) fn throughput(report: &StepReport) -> Option<f64> {
    Some(report.rollout.as_ref()?.total_tokens() as f64 / report.timings.total().max(1e-9))
}
