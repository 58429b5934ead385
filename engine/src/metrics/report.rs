//! What a step was: facts in types. [`metrics`](super::metrics()) puts them under names.

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

/// What one step of a run was.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// Finished steps, this one included.
    pub step: u64,
    /// Seconds of the step, without its validation and checkpoint.
    pub seconds: f64,
    /// Seconds of its phases.
    pub timings: PhaseTimings,
    /// What was sampled; none in supervised training.
    pub rollout: Option<RolloutReport>,
    /// The critic's update, where it has an optimizer of its own.
    pub critic: Option<UpdateReport>,
    /// The policy's update; none while the critic trains alone.
    pub actor: Option<UpdateReport>,
    /// Epochs finished with this step, in supervised training on a finite number of examples.
    pub epoch: Option<f64>,
    /// Memory; not read in a warm-up.
    pub memory: Option<StepMemory>,
}

/// What a step sampled, and what it was worth.
#[derive(Clone, Debug)]
pub struct RolloutReport {
    /// The prompts that were drawn, in order.
    pub prompts: Vec<Prompt>,
    /// Index of the first of them among all prompts of the run.
    pub first_prompt: u64,
    /// The completions that are trained on, groups together and in the order of their prompts.
    pub rollouts: Vec<Rollout>,
    /// The groups that are not, because a reward of theirs could not be computed.
    pub left_out: Vec<Rollout>,
    /// How they were sampled.
    pub stats: RolloutStats,
    /// What the objective reports of its advantages, under names of its own.
    pub advantages: Vec<(String, f64)>,
    /// Coefficient of the entropy bonus after the step, where it adapts.
    pub entropy_coeff: Option<f64>,
    /// Running statistics of the rewards that are normalised, by name.
    pub reward_stats: BTreeMap<String, RunningStats>,
}

impl RolloutReport {
    /// Leaves out the groups that have lost a reward.
    pub fn leave_out_lost(&mut self) {
        let rollouts = self.rollouts.iter().filter(|r| r.is_lost());
        let lost: BTreeSet<u64> = rollouts.map(|r| r.prompt_index).collect();
        let own = self.rollouts.extract_if(.., |r| lost.contains(&r.prompt_index));
        self.left_out.extend(own);
        self.stats.left_out_groups += lost.len();
    }

    /// Tokens of the completions.
    pub fn completion_tokens(&self) -> usize {
        self.rollouts.iter().map(|r| r.completion.len()).sum()
    }

    /// Tokens of prompts and completions, a prompt counted once for each of its completions.
    pub fn total_tokens(&self) -> usize {
        let prompts: usize = self.rollouts.iter().map(|r| r.prompt.len()).sum();
        prompts + self.completion_tokens()
    }
}

/// How the rollouts of a step were sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RolloutStats {
    /// Counts and times of the generation engine.
    pub engine: GenerationStats,
    /// Batches of prompts that were sampled: more than one where dynamic sampling asked for more.
    pub gen_batches: usize,
    /// Groups that were sampled.
    pub sampled_groups: usize,
    /// Groups that are trained on.
    pub kept_groups: usize,
    /// Sampled groups all of whose rewards are equal.
    pub zero_std_groups: f64,
    /// Groups that are left out, since a rollout of theirs has lost its environment or a reward.
    pub left_out_groups: usize,
    /// How the last batch of prompts loaded experts, in a model with experts.
    pub experts: Option<ExpertLoad>,
    /// How rewards fared that other programs compute, where there are any.
    pub programs: Option<ProgramStats>,
    /// How turns and environments fared, where there are any.
    pub turns: Option<TurnStats>,
    /// How long ranks waited for others, where there are several.
    pub ranks: Option<RankWaits>,
}

/// How long ranks waited, after their part of the sampling and judging of a step, for the rank that was last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankWaits {
    /// Seconds of the rank that waited longest.
    pub max_seconds: f64,
    /// Seconds of a rank in the mean.
    pub mean_seconds: f64,
}

impl RankWaits {
    /// Adds the waits of all ranks for another batch of prompts.
    pub fn add(&mut self, waits: impl ExactSizeIterator<Item = f64>) {
        let ranks = waits.len().max(1) as f64;
        let (sum, most) = waits.fold((0.0, 0.0), |(sum, most): (f64, f64), wait| (sum + wait, most.max(wait)));
        self.max_seconds += most;
        self.mean_seconds += sum / ranks;
    }
}

/// How a step's rewards fared that other programs compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub struct ProgramStats {
    /// Seconds from the last completion to the last verdict: what training waited for them.
    pub wait_seconds: f64,
    /// Completions that were judged again, since the worker that they were sent to died or did not answer in time.
    pub repeated: usize,
    /// Completions that have lost a reward.
    pub lost: usize,
}

/// The sum of a number over optimizer steps, and how many of them reported it.
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

    /// The mean; none where nothing was reported.
    pub fn value(self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }
}

/// The update of a model in a step: one optimizer step or several.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateReport {
    /// Learning rate.
    pub lr: f64,
    /// Learning rate of the value head, where it shares the policy's trunk.
    pub value_lr: Option<f64>,
    /// What the loss reports, under names of its own.
    pub losses: BTreeMap<&'static str, Mean>,
    /// Gradient norms before clipping.
    pub grad_norm: Mean,
    /// Loss scales.
    pub loss_scale: Mean,
    /// Optimizer steps that were not taken, since no token had a weight in their loss.
    pub skipped_empty: usize,
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
    /// Mean reward of the completions of the validation prompts that have one, where there are any.
    pub reward: Option<f64>,
    /// The completions, judged.
    pub samples: Vec<JudgedSample>,
    /// Completions to which no reward applies, where there are prompts.
    pub unjudged: Option<usize>,
    /// Mean negative log-likelihood of the scored tokens of held-out examples, in supervised training that has some.
    pub loss: Option<f64>,
}

/// Memory of a step.
#[derive(Clone, Debug)]
pub struct StepMemory {
    /// Readings at the ends of the phases.
    pub readings: Vec<LedgerEntry>,
    /// Most bytes allocated: the peak of the counted heap, or of the readings of the pools.
    pub allocated_bytes: u64,
    /// Most bytes reserved at the end of a phase: the pools with their free pages; on the CPU the peak.
    pub reserved_bytes: u64,
    /// Most bytes that the driver says were used at the end of a phase, by this program or another; `None` where no
    /// driver says.
    pub device_used_bytes: Option<u64>,
    /// Largest resident set of the process so far, where the system tells.
    pub resident_bytes: Option<u64>,
    /// What grows from step to step; reported once.
    pub leak: Option<Leak>,
}

impl StepMemory {
    /// The memory of a step with these readings.
    pub fn new(readings: Vec<LedgerEntry>, leak: Option<Leak>) -> Self {
        let most = |f: fn(&LedgerEntry) -> u64| readings.iter().map(f).max().unwrap_or(0);
        Self {
            allocated_bytes: most(|e| e.reading.peak_bytes.unwrap_or(e.reading.in_use_bytes)),
            reserved_bytes: most(|e| match e.reading.source {
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
