//! Metrics of steps and validations by name, verl's if verl has the metric. [`METRICS`] has the names; losses and
//! advantages name their own.

use super::described::{METRICS, Metrics};
use super::phase::PhaseTimings;
use super::report::{StepReport, ValidationReport};
use super::validation::{JudgedSample, rewards, statistics};

/// Returns true if a metric is a time or a memory size, in which ranks differ.
pub fn is_of_a_machine(name: &str) -> bool {
    name.starts_with("timing_") || name.starts_with("perf/") || name.ends_with("_per_second")
}

/// Metrics of a step.
pub fn metrics(report: &StepReport) -> Metrics {
    let mut metrics = timings(&report.timings);
    let updates = [&report.critic, &report.actor].into_iter().flatten();
    let losses = updates.flat_map(|update| &update.losses);
    metrics.extend(losses.filter_map(|(&name, mean)| Some((name.to_owned(), mean.value()?))));
    metrics.extend(report.rollout.iter().flat_map(|rollout| rollout.advantages.iter().cloned()));
    for row in METRICS.iter().flat_map(|(_, rows)| *rows) {
        row.add(report, &mut metrics);
    }
    metrics
}

/// Metrics of a validation; empty without validation data.
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

/// Name of the mean validation reward of a task or set.
pub fn validation_reward(set: &str) -> String {
    format!("val-core/{set}/reward")
}

/// Name of the number of a task's validation completions to which no reward applies.
pub fn validation_unjudged(task: &str) -> String {
    format!("val-aux/{task}/unjudged")
}

/// Statistics of scored completions by set, as in verl: the largest number of samples under `val-core`, others under
/// `val-aux`.
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

/// Seconds of phases.
pub fn timings(timings: &PhaseTimings) -> Metrics {
    let named = timings.iter();
    named.map(|(phase, seconds)| (format!("timing_s/{phase}"), seconds)).collect()
}

#[cfg(test)]
mod tests;
