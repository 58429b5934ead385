//! The names of metrics, verl's where verl has the metric. Nothing else in the engine names one, but for what losses
//! and advantages report of themselves.

use super::phase::{Phase, PhaseTimings};
use super::report::{RolloutReport, StepMemory, StepReport, UpdateReport, ValidationReport};
use super::validation::{JudgedSample, rewards, statistics};
use crate::objective::mismatch::{DIFF_MAX, DIFF_MEAN};
use crate::objective::value::explained_variance;
use crate::rollout::Rollout;
use crate::sequence::TokenColumns;
use crate::turns::TurnStats;
use firebrick_sampler::FinishReason;
use std::collections::BTreeMap;

/// Metrics of one step or validation, by name.
pub type Metrics = BTreeMap<String, f64>;

/// The metric that says which step a line of `metrics.jsonl` belongs to.
pub const GLOBAL_STEP: &str = "training/global_step";

/// Whether a metric says how fast a machine is or what its memory holds: ranks differ in those.
#[must_use]
pub fn is_of_a_machine(name: &str) -> bool {
    name.starts_with("timing_") || name.starts_with("perf/") || name.ends_with("_per_second")
}

/// The metrics of a step.
#[must_use]
pub fn metrics(report: &StepReport) -> Metrics {
    let mut metrics = timings(&report.timings);
    let mut put = |name: &str, value: f64| {
        metrics.insert(name.to_owned(), value);
    };
    put(GLOBAL_STEP, report.step as f64);
    put("timing_s/step", report.seconds);
    put("perf/time_per_step", report.seconds);
    if let Some(epoch) = report.epoch {
        put("training/epoch", epoch);
    }
    if let Some(memory) = &report.memory {
        memory_metrics(memory, &mut put);
    }
    if let Some(update) = &report.critic {
        update_metrics(update, &CRITIC, &mut put);
    }
    if let Some(update) = &report.actor {
        update_metrics(update, &ACTOR, &mut put);
    }
    if let Some(rollout) = &report.rollout {
        sampling_metrics(rollout, &mut put);
        reward_metrics(rollout, &mut put);
        advantage_metrics(rollout, &mut put);
        throughput_metrics(rollout, &report.timings, &mut put);
    }
    metrics
}

/// The values of a validation; none where there was nothing to validate on.
#[must_use]
pub fn validation_metrics(report: &ValidationReport) -> Metrics {
    let mut metrics = Metrics::new();
    if let Some(reward) = report.reward {
        metrics.extend(judged_metrics(&report.samples));
        metrics.insert(validation_reward(&report.task), reward);
    }
    if let Some(unjudged) = report.unjudged {
        metrics.insert(validation_unjudged(&report.task), unjudged as f64);
    }
    if let Some(loss) = report.loss {
        metrics.insert("val/loss".into(), loss);
        metrics.insert("val/perplexity".into(), loss.exp());
    }
    metrics
}

/// The name of the mean validation reward of a task, or of one of its sets.
#[must_use]
pub fn validation_reward(set: &str) -> String {
    format!("val-core/{set}/reward")
}

/// The name of the number of a task's validation completions to which no reward applies.
#[must_use]
pub fn validation_unjudged(task: &str) -> String {
    format!("val-aux/{task}/unjudged")
}

/// The statistics of judged completions by set: verl's, the largest number of samples under `val-core` and the rest
/// under `val-aux`.
#[must_use]
pub fn judged_metrics(samples: &[JudgedSample]) -> Metrics {
    let rewards = rewards(samples).into_iter();
    let mut metrics: Metrics = rewards.map(|(set, mean)| (validation_reward(set), mean)).collect();
    for statistic in statistics(samples) {
        let section = if statistic.core { "val-core" } else { "val-aux" };
        let name = format!("{section}/{}/{}/{}", statistic.set, statistic.variable, statistic.name);
        metrics.insert(name, statistic.value);
    }
    metrics
}

/// The seconds of phases.
#[must_use]
pub fn timings(timings: &PhaseTimings) -> Metrics {
    let named = timings.iter();
    named.map(|(phase, seconds)| (format!("timing_s/{phase}"), seconds)).collect()
}

fn memory_metrics(memory: &StepMemory, put: &mut impl FnMut(&str, f64)) {
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    put("perf/max_memory_allocated_gb", gib(memory.allocated_bytes));
    put("perf/max_memory_reserved_gb", gib(memory.reserved_bytes));
    if let Some(used) = memory.device_used_bytes {
        put("perf/device_memory_used_gb", gib(used));
    }
    let resident = memory.resident_bytes.unwrap_or(0);
    put("perf/cpu_memory_used_gb", gib(resident));
}

/// Names of an update's metrics.
struct UpdateNames {
    lr: &'static str,
    grad_norm: &'static str,
    loss_scale: &'static str,
    skipped_empty: &'static str,
    num_micro_batches: &'static str,
    /// Of what else is reported of the micro-batches.
    batch: &'static str,
}

const ACTOR: UpdateNames = UpdateNames {
    lr: "actor/lr",
    grad_norm: "actor/grad_norm",
    loss_scale: "actor/loss_scale",
    skipped_empty: "actor/skipped_empty",
    num_micro_batches: "batch/num_micro_batches",
    batch: "batch/",
};

const CRITIC: UpdateNames = UpdateNames {
    lr: "critic/lr",
    grad_norm: "critic/grad_norm",
    loss_scale: "critic/loss_scale",
    skipped_empty: "critic/skipped_empty",
    num_micro_batches: "batch/num_critic_micro_batches",
    batch: "batch/critic_",
};

/// Means over the optimizer steps, and the micro-batches of all of them.
fn update_metrics(update: &UpdateReport, names: &UpdateNames, put: &mut impl FnMut(&str, f64)) {
    let own = [(names.grad_norm, update.grad_norm), (names.loss_scale, update.loss_scale)];
    let losses = update.losses.iter().map(|(&name, &mean)| (name, mean));
    for (name, mean) in losses.chain(own) {
        if let Some(value) = mean.value() {
            put(name, value);
        }
    }
    put(names.lr, update.lr);
    put(names.skipped_empty, update.skipped_empty as f64);
    if let Some(lr) = update.value_lr {
        put(CRITIC.lr, lr);
    }
    let batch = &update.batch;
    put(names.num_micro_batches, batch.micro_batches as f64);
    for (name, value) in [
        ("tokens", batch.tokens as f64),
        ("padding", batch.padding()),
        ("attention_padding", batch.attention_padding()),
        ("largest_micro_batch", batch.largest as f64),
        ("token_budget", batch.budget as f64),
        ("imbalance", batch.imbalance),
    ] {
        put(&format!("{}{name}", names.batch), value);
    }
}

fn sampling_metrics(rollout: &RolloutReport, put: &mut impl FnMut(&str, f64)) {
    let (stats, engine) = (&rollout.stats, &rollout.stats.engine);
    let dropped = stats.sampled_groups - stats.kept_groups;
    let zero_std = stats.zero_std_groups / stats.sampled_groups.max(1) as f64;
    for (name, value) in [
        ("rollout/prefill_tokens_per_second", engine.prefill_rate()),
        ("rollout/decode_tokens_per_second", engine.decode_rate()),
        ("rollout/slot_occupancy", engine.occupancy()),
        ("rollout/overrun_tokens", engine.overrun as f64),
        ("rollout/preemptions", engine.preemptions as f64),
        ("rollout/recomputed_tokens", engine.recomputed_tokens as f64),
        ("rollout/preempted", engine.preempted as f64),
        ("rollout/prefix_cache_hits", engine.prefix_cache_hits as f64),
        ("rollout/peak_cache_bytes", engine.peak_cache_bytes as f64),
        ("rollout/kv_waste", engine.kv_waste()),
        ("rollout/kv_shared", engine.kv_shared()),
        ("rollout/num_gen_batches", stats.gen_batches as f64),
        ("rollout/dropped_groups", dropped as f64),
        ("frac_reward_zero_std", zero_std),
    ] {
        put(name, value);
    }
    if let Some(ranks) = &stats.ranks {
        put("timing_s/rank_wait/max", ranks.max_seconds);
        put("timing_s/rank_wait/mean", ranks.mean_seconds);
    }
    if let Some(load) = &stats.experts {
        put("rollout/expert_load_max", load.max);
        put("rollout/expert_load_min", load.min);
        put("rollout/experts_unused", load.unused);
    }
    let compared = rollout.rollouts.iter().filter_map(|r| r.rerouted);
    let [tokens, others] = compared.fold([0, 0], |[tokens, others], own| [tokens + own.tokens, others + own.others]);
    if tokens > 0 {
        put("rollout/rerouted", others as f64 / tokens as f64);
    }
    if let Some(programs) = &stats.programs {
        put("timing_s/reward_wait", programs.wait_seconds);
        put("reward/repeated", programs.repeated as f64);
        put("reward/lost", programs.lost as f64);
    }
    if let Some(turns) = &stats.turns {
        turn_metrics(rollout, turns, put);
    }
    if stats.programs.is_some() || stats.turns.is_some() {
        put("rollout/left_out_groups", stats.left_out_groups as f64);
    }
    let rollouts = &rollout.rollouts;
    let lengths = |of: fn(&Rollout) -> usize| -> Vec<f64> { rollouts.iter().map(|r| of(r) as f64).collect() };
    spread("response_length", &lengths(|r| r.completion.len()), put);
    spread("prompt_length", &lengths(|r| r.prompt.len()), put);
    let cut = rollouts.iter().filter(|r| r.finish == FinishReason::Length);
    let clip_ratio = cut.count() as f64 / rollouts.len() as f64;
    put("response_length/clip_ratio", clip_ratio);
    let differences: Vec<f64> = rollouts.iter().flat_map(probability_differences).collect();
    if !differences.is_empty() {
        put(DIFF_MAX, differences.iter().copied().fold(0.0, f64::max));
        put(DIFF_MEAN, mean(&differences));
    }
}

/// Turns and tool calls: `num_turns` is verl's name, `tools` are TRL's.
fn turn_metrics(rollout: &RolloutReport, turns: &TurnStats, put: &mut impl FnMut(&str, f64)) {
    let counts = rollout.rollouts.iter().map(|r| r.num_turns() as f64);
    spread("num_turns", &counts.collect::<Vec<f64>>(), put);
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    for (name, value) in [
        ("tools/call_frequency", share(turns.tool_calls, turns.rollouts)),
        ("tools/failure_frequency", share(turns.failed_calls, turns.tool_calls)),
        ("environment/retries", turns.retries as f64),
        ("environment/lost", turns.lost as f64),
        ("environment/template_mismatch", turns.differ_from_template as f64),
    ] {
        put(name, value);
    }
}

fn reward_metrics(rollout: &RolloutReport, put: &mut impl FnMut(&str, f64)) {
    let rollouts = &rollout.rollouts;
    let of = |f: fn(&Rollout) -> Option<f64>| rollouts.iter().filter_map(f).collect::<Vec<f64>>();
    spread("critic/score", &of(|r| r.reward), put);
    spread("critic/rewards", &of(|r| r.reward.map(|_| r.penalized_reward)), put);
    let judged = rollouts.iter().filter(|r| r.reward.is_some());
    put("rollout/unjudged", (rollouts.len() - judged.clone().count()) as f64);
    put("rollout/masked", judged.filter(|r| !r.is_scored()).count() as f64);
    let parts = rollouts.first().map(|r| r.reward_parts.as_slice());
    for (place, (name, _)) in parts.unwrap_or_default().iter().enumerate() {
        // of those that it applies to
        let values = rollouts.iter().filter_map(|r| r.reward_parts.get(place).map(|(_, value)| *value));
        let values: Vec<f64> = values.filter(|value| !value.is_nan()).collect();
        put(&format!("reward/{name}/missing"), (rollouts.len() - values.len()) as f64);
        if !values.is_empty() {
            put(&format!("reward/{name}/mean"), mean(&values));
        }
        if let Some(running) = rollout.reward_stats.get(name) {
            put(&format!("reward/{name}/running_mean"), running.mean);
            put(&format!("reward/{name}/running_std"), running.std());
        }
    }
    let mut extra: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for (name, value) in rollouts.iter().flat_map(|r| &r.reward_extra) {
        let truth = value.as_bool().map(|truth| f64::from(u8::from(truth)));
        if let Some(number) = value.as_f64().or(truth) {
            extra.entry(name).or_default().push(number);
        }
    }
    for (name, values) in extra {
        put(&format!("reward/{name}/mean"), mean(&values));
    }
}

/// Advantages, values and returns of scored tokens.
fn advantage_metrics(rollout: &RolloutReport, put: &mut impl FnMut(&str, f64)) {
    for (name, value) in &rollout.advantages {
        put(name, *value);
    }
    if let Some(coefficient) = rollout.entropy_coeff {
        put("actor/entropy_coeff", coefficient);
    }
    let scored = |of: fn(&TokenColumns<Vec<f64>>) -> &Option<Vec<f64>>| -> Vec<f64> {
        let rollouts = rollout.rollouts.iter();
        let own = rollouts.flat_map(|r| of(&r.columns).iter().flat_map(|column| r.scored(column)));
        own.collect()
    };
    spread("critic/advantages", &scored(|columns| &columns.advantage), put);
    let values = scored(|columns| &columns.value);
    if values.is_empty() {
        return;
    }
    let returns = scored(|columns| &columns.returns);
    spread("critic/values", &values, put);
    spread("critic/returns", &returns, put);
    let explained = explained_variance(&values, &returns);
    put("critic/vf_explained_var", explained);
}

/// Tokens, and the time they took: of the whole step by the seconds of its phases.
fn throughput_metrics(rollout: &RolloutReport, timings: &PhaseTimings, put: &mut impl FnMut(&str, f64)) {
    let (sampled, total) = (rollout.completion_tokens(), rollout.total_tokens());
    put("perf/total_num_tokens", total as f64);
    let seconds = timings.total().max(1e-9);
    put("perf/throughput", total as f64 / seconds);
    for (phase, tokens) in [(Phase::Generate, sampled), (Phase::UpdateActor, total)] {
        let ms = timings.seconds(phase) * 1e3 / tokens.max(1) as f64;
        put(&format!("timing_per_token_ms/{phase}"), ms);
    }
}

/// Difference between the sampler's and the trainer's probability of every token whose old log-prob was computed again.
fn probability_differences(rollout: &Rollout) -> impl Iterator<Item = f64> {
    let columns = &rollout.columns;
    let pairs = columns.full_logp.iter().flatten().zip(columns.old_logp.iter().flatten());
    let sampled = pairs.zip(rollout.sampled());
    sampled.filter(|(_, sampled)| *sampled).map(|((sampler, trainer), _)| (sampler.exp() - trainer.exp()).abs())
}

/// Mean, largest and smallest of some values; nothing where there are none.
fn spread(name: &str, values: &[f64], put: &mut impl FnMut(&str, f64)) {
    if values.is_empty() {
        return;
    }
    let fold = |from, pick: fn(f64, f64) -> f64| values.iter().copied().fold(from, pick);
    put(&format!("{name}/mean"), mean(values));
    put(&format!("{name}/max"), fold(f64::NEG_INFINITY, f64::max));
    put(&format!("{name}/min"), fold(f64::INFINITY, f64::min));
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

#[cfg(test)]
mod tests;
