//! TRL's batch sizes in completions and prompts.

use super::class::{Class, class};
use crate::facts::Facts;
use crate::key_mapping::{MappedKey, not_needed};

/// Devices of the other engine's run on all machines, if known.
pub(super) fn devices(facts: &Facts) -> Option<u64> {
    let first = |keys: &[&str]| keys.iter().find_map(|key| positive(facts, key));
    let machines = first(&["num_machines", "nnodes", "num_nodes"]).unwrap_or(1);
    let included = facts.text("include").map(|ids| ids.split(',').filter(|id| !id.is_empty()).count() as u64);
    let per_machine = first(&["nproc_per_node", "num_gpus"]).or(included);
    facts.devices.or_else(|| first(&["num_processes"])).or(per_machine.map(|devices| devices * machines))
}

fn positive(facts: &Facts, key: &str) -> Option<u64> {
    facts.whole(key).and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0)
}

/// Batches of a Firebrick step. TRL counts completions per device, and optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BatchSizes {
    /// Completions per round of sampling.
    pub completions: u64,
    /// Completions per prompt.
    pub group: u64,
    /// Completions per optimizer step.
    pub mini: u64,
    /// Passes over a round's completions.
    pub passes: u64,
    /// Number of devices if known; one is assumed otherwise.
    pub devices: Option<u64>,
}

impl BatchSizes {
    pub fn new(facts: &Facts) -> Self {
        let count = |key: &str| positive(facts, key);
        let devices = devices(facts);
        let per_step = count("per_device_train_batch_size").unwrap_or(8) * devices.unwrap_or(1);
        let accumulated = count("gradient_accumulation_steps").unwrap_or(1);
        let mini = per_step * accumulated;
        if class(facts) == Class::Ppo {
            return Self {
                completions: mini * count("num_mini_batches").unwrap_or(1),
                group: 1,
                mini,
                passes: count("num_ppo_epochs").unwrap_or(4),
                devices,
            };
        }
        let completions = count("generation_batch_size")
            .unwrap_or_else(|| per_step * count("steps_per_generation").unwrap_or(accumulated));
        let group = count("num_generations").unwrap_or(if class(facts) == Class::Rloo { 2 } else { 8 });
        Self { completions, group, mini, passes: count("num_iterations").unwrap_or(1), devices }
    }

    /// Prompts per round, if that is an integer.
    pub fn prompts(&self) -> Option<u64> {
        (self.completions.is_multiple_of(self.group)).then_some(self.completions / self.group)
    }

    /// Prompts per optimizer step, if that is an integer that divides the round's.
    pub fn mini_prompts(&self) -> Option<u64> {
        let mini = self.mini / self.group;
        let whole = self.mini.is_multiple_of(self.group) && mini > 0;
        let prompts = self.prompts()?;
        (whole && mini <= prompts && prompts.is_multiple_of(mini)).then_some(mini)
    }

    /// Reason why prompts are no integer, with the remedy.
    pub fn broken(&self) -> String {
        let what = if self.devices.is_some() {
            "TRL rejects that too"
        } else {
            "pass --devices N with the devices of that run"
        };
        format!("{} are not a whole number of groups: {what}", self.note())
    }

    /// Reason why a round is one optimizer step.
    pub fn one_step(&self) -> String {
        format!(
            "{} completions per optimizer step are not a whole number of groups: a round of sampling is one step here",
            self.mini
        )
    }

    /// Outcome of other keys of an invalid batch.
    pub fn part_of_broken(&self) -> Option<MappedKey> {
        let why = "a part of trainer.train_batch_size, which needs the devices of that run";
        self.prompts().is_none().then(|| not_needed(why))
    }

    /// Optimizer steps per round of sampling, as TRL counts them.
    pub fn optimizer_steps(&self) -> u64 {
        (self.completions / self.mini.max(1)).max(1) * self.passes
    }

    /// Rounds of sampling for a number of optimizer steps.
    pub fn rounds(&self, optimizer_steps: u64) -> u64 {
        optimizer_steps.div_ceil(self.optimizer_steps())
    }

    /// Note on the conversion of completions to prompts.
    pub fn note(&self) -> String {
        let devices = self.devices.unwrap_or(1);
        let plural = if devices == 1 { "" } else { "s" };
        format!("{} completions a round on {devices} device{plural}, {} a prompt", self.completions, self.group)
    }
}
