//! Facts of a step, which [`metrics`](super::metrics()) converts to named values.

use super::expert_load::ExpertLoad;
use super::ledger::{Leak, LedgerEntry};
use super::phase::PhaseTimings;
use super::validation::JudgedSample;
use crate::batch::BatchStats;
use crate::data::Prompt;
use crate::learner::Updated;
use crate::rollout::Rollout;
use crate::task::RunningStats;
use crate::turns::TurnStats;
use firebrick_backends::memory::{ReadingSource, peak_resident_bytes};
use firebrick_sampler::GenerationStats;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Facts of a step.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// Finished steps, this one included.
    pub step: u64,
    /// Seconds of the step, without its validation and checkpoint.
    pub seconds: f64,
    /// Seconds that the run waited for the checkpoint of an earlier step.
    pub save_seconds: Option<f64>,
    /// Seconds of its phases.
    pub timings: PhaseTimings,
    /// Rollouts, in reinforcement learning.
    pub rollout: Option<RolloutReport>,
    /// Update of a separate critic.
    pub critic: Option<UpdateReport>,
    /// Update of the policy; `None` while only the critic is trained.
    pub actor: Option<UpdateReport>,
    /// Finished epochs, in supervised training on a finite number of examples.
    pub epoch: Option<f64>,
    /// Memory, except in a warm-up.
    pub memory: Option<StepMemory>,
}

/// Rollouts of a step, with their rewards.
#[derive(Clone, Debug)]
pub struct RolloutReport {
    /// Drawn prompts, in order.
    pub prompts: Vec<Prompt>,
    /// Index of the first prompt among all prompts of the run.
    pub first_prompt: u64,
    /// Trained completions, by groups in the order of their prompts.
    pub rollouts: Vec<Rollout>,
    /// Groups that are excluded because a reward could not be computed.
    pub left_out: Vec<Rollout>,
    /// Sampling statistics.
    pub stats: RolloutStats,
    /// Metrics of the objective's advantages, by name.
    pub advantages: Vec<(String, f64)>,
    /// Adaptive coefficient of the entropy bonus after the step.
    pub entropy_coeff: Option<f64>,
    /// Running statistics of normalized rewards, by name.
    pub reward_stats: BTreeMap<String, RunningStats>,
}

impl RolloutReport {
    /// Excludes the groups that have lost a reward.
    pub fn exclude_lost(&mut self) {
        let rollouts = self.rollouts.iter().filter(|r| r.is_lost());
        let lost: BTreeSet<u64> = rollouts.map(|r| r.prompt_index).collect();
        self.left_out.extend(self.rollouts.extract_if(.., |r| lost.contains(&r.prompt_index)));
        self.stats.left_out_groups += lost.len();
    }

    /// Tokens of the completions.
    pub fn completion_tokens(&self) -> usize {
        self.rollouts.iter().map(|r| r.completion.len()).sum()
    }

    /// Tokens of prompts and completions; a prompt counts once per completion.
    pub fn total_tokens(&self) -> usize {
        let prompts: usize = self.rollouts.iter().map(|r| r.prompt.len()).sum();
        prompts + self.completion_tokens()
    }
}

/// Sampling statistics of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RolloutStats {
    /// Counts and times of the generation engine.
    pub engine: GenerationStats,
    /// Sampled batches of prompts: several with dynamic sampling.
    pub gen_batches: usize,
    /// Sampled groups.
    pub sampled_groups: usize,
    /// Trained groups.
    pub kept_groups: usize,
    /// Sampled groups of equal rewards.
    pub zero_std_groups: f64,
    /// Groups that are excluded because a rollout has lost its environment or a reward.
    pub left_out_groups: usize,
    /// Load of experts by the last batch of prompts.
    pub experts: Option<ExpertLoad>,
    /// Statistics of reward programs.
    pub programs: Option<ProgramStats>,
    /// Statistics of turns and environments.
    pub turns: Option<TurnStats>,
    /// Waits of several ranks.
    pub ranks: Option<RankWaits>,
}

/// Waits of ranks, after sampling and rewards of a step, for the slowest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankWaits {
    /// Longest wait.
    pub max_seconds: f64,
    /// Mean wait.
    pub mean_seconds: f64,
}

impl RankWaits {
    /// Adds the waits of all ranks for another batch of prompts.
    pub fn add(&mut self, waits: impl ExactSizeIterator<Item = f64>) {
        let ranks = waits.len().max(1) as f64;
        let (sum, max) = waits.fold((0.0, 0.0), |(sum, max): (f64, f64), wait| (sum + wait, max.max(wait)));
        self.max_seconds += max;
        self.mean_seconds += sum / ranks;
    }
}

/// Statistics of a step's reward programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ProgramStats {
    /// Seconds from the last completion to the last reward.
    pub wait_seconds: f64,
    /// Completions that were scored again because their worker died or timed out.
    pub repeated: usize,
    /// Completions that have lost a reward.
    pub lost: usize,
}

/// Mean of a value over the optimizer steps that report it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mean {
    sum: f64,
    count: u64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1;
    }

    /// The mean, if a value was reported.
    pub fn value(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The update of a model in a step: one optimizer step or several.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateReport {
    /// Learning rate.
    pub lr: f64,
    /// Learning rate of a value head on the policy's trunk.
    pub value_lr: Option<f64>,
    /// Metrics of the loss, by name.
    pub losses: BTreeMap<&'static str, Mean>,
    /// Gradient norms before clipping.
    pub grad_norm: Mean,
    /// Loss scales.
    pub loss_scale: Mean,
    /// Optimizer steps skipped because no token had a weight in the loss.
    pub skipped_empty: usize,
    /// Optimizer steps skipped because a number was NaN or infinite, overflows under a dynamic loss scale included.
    pub skipped_non_finite: usize,
    /// Micro-batches of all optimizer steps.
    pub batch: BatchStats,
}

impl UpdateReport {
    /// An update at a learning rate, before its first optimizer step.
    pub fn new(lr: f64) -> Self {
        Self { lr, ..Self::default() }
    }

    /// Adds an optimizer step.
    pub fn add(&mut self, updated: &Updated) {
        for (name, value) in updated.sums.values() {
            self.losses.entry(name).or_default().add(value);
        }
        self.grad_norm.add(updated.outcome.grad_norm);
        if let Some(scale) = updated.outcome.loss_scale {
            self.loss_scale.add(scale);
        }
        self.batch.absorb(updated.batch);
    }
}

/// A validation.
#[derive(Clone, Debug, Default)]
pub struct ValidationReport {
    /// Finished steps.
    pub step: u64,
    /// Seconds of its phases.
    pub timings: PhaseTimings,
    /// Name of the task.
    pub task: String,
    /// Mean reward of the validation completions that have one.
    pub reward: Option<f64>,
    /// Scored completions.
    pub samples: Vec<JudgedSample>,
    /// Completions to which no reward applies, with validation prompts.
    pub unjudged: Option<usize>,
    /// Mean negative log-likelihood of the scored tokens of validation examples, in supervised training.
    pub loss: Option<f64>,
}

/// Memory of a step.
#[derive(Clone, Debug)]
pub struct StepMemory {
    /// Readings at the ends of the phases.
    pub readings: Vec<LedgerEntry>,
    /// Peak of allocated bytes: of the counted heap, or of the readings of the pools.
    pub allocated_bytes: u64,
    /// Maximum of the reserved bytes at the ends of phases: of pools with their free pages; on the CPU the peak.
    pub reserved_bytes: u64,
    /// Maximum of the used bytes at the ends of phases according to the driver, with other programs.
    pub device_used_bytes: Option<u64>,
    /// Peak resident set of the process, if the system reports it.
    pub resident_bytes: Option<u64>,
    /// Leak, reported once.
    pub leak: Option<Leak>,
}

impl StepMemory {
    /// The memory of a step with these readings.
    pub fn new(readings: Vec<LedgerEntry>, leak: Option<Leak>) -> Self {
        let max = |f: fn(&LedgerEntry) -> u64| readings.iter().map(f).max().unwrap_or(0);
        Self {
            allocated_bytes: max(|e| e.reading.peak_bytes.unwrap_or(e.reading.in_use_bytes)),
            reserved_bytes: max(|e| match e.reading.source {
                ReadingSource::BurnPool => e.reading.reserved_bytes,
                _ => e.reading.peak_bytes.unwrap_or(e.reading.reserved_bytes),
            }),
            device_used_bytes: readings.iter().filter_map(LedgerEntry::driver_used_bytes).max(),
            resident_bytes: peak_resident_bytes(),
            leak,
            readings,
        }
    }
}
