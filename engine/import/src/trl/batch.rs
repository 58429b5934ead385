//! How many completions and prompts TRL's batch sizes are.

use super::class::{Class, class};
use crate::facts::Facts;
use crate::key_mapping::{MappedKey, not_needed};

/// The devices of the other engine's run, where that is known: of all machines.
pub(super) fn devices(facts: &Facts) -> Option<u64> {
    let count = |key: &str| positive(facts, key);
    let machines = ["num_machines", "nnodes", "num_nodes"].into_iter().find_map(count).unwrap_or(1);
    let named = facts.text("include").map(|own| own.split(',').filter(|id| !id.is_empty()).count() as u64);
    let each = ["nproc_per_node", "num_gpus"].into_iter().find_map(count).or(named);
    facts.devices.or_else(|| count("num_processes")).or(each.map(|each| each * machines))
}

fn positive(facts: &Facts, key: &str) -> Option<u64> {
    facts.whole(key).and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0)
}

/// The batches of a step of ours: TRL counts completions a device, and optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BatchSizes {
    /// Completions of a round of sampling.
    pub completions: u64,
    /// Completions a prompt.
    pub group: u64,
    /// Completions an optimizer step.
    pub mini: u64,
    /// Passes over a round's completions.
    pub passes: u64,
    /// Devices, where their number is known; one is counted otherwise.
    pub devices: Option<u64>,
}

impl BatchSizes {
    pub fn of(facts: &Facts) -> Self {
        let count = |key: &str| positive(facts, key);
        let devices = devices(facts);
        let each = count("per_device_train_batch_size").unwrap_or(8) * devices.unwrap_or(1);
        let accumulated = count("gradient_accumulation_steps").unwrap_or(1);
        let mini = each * accumulated;
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
            .unwrap_or_else(|| each * count("steps_per_generation").unwrap_or(accumulated));
        let group = count("num_generations").unwrap_or(if class(facts) == Class::Rloo { 2 } else { 8 });
        Self { completions, group, mini, passes: count("num_iterations").unwrap_or(1), devices }
    }

    /// Prompts of a round, where they are whole.
    pub fn prompts(&self) -> Option<u64> {
        (self.completions.is_multiple_of(self.group)).then_some(self.completions / self.group)
    }

    /// Prompts of an optimizer step, where they are whole and divide the round's.
    pub fn mini_prompts(&self) -> Option<u64> {
        let mini = self.mini / self.group;
        let whole = self.mini.is_multiple_of(self.group) && mini > 0;
        let prompts = self.prompts()?;
        (whole && mini <= prompts && prompts.is_multiple_of(mini)).then_some(mini)
    }

    /// Why prompts are not whole, and what to do.
    pub fn broken(&self) -> String {
        let what = if self.devices.is_some() {
            "TRL rejects that too"
        } else {
            "pass --devices N with the devices of that run"
        };
        format!("{} are not a whole number of groups: {what}", self.note())
    }

    /// Why an optimizer step is a round.
    pub fn one_step(&self) -> String {
        format!(
            "{} completions per optimizer step are not a whole number of groups: a round of sampling is one step here",
            self.mini
        )
    }

    /// A key that a broken batch is not to be blamed for.
    pub fn part_of_broken(&self) -> Option<MappedKey> {
        let why = "a part of trainer.train_batch_size, which needs the devices of that run";
        self.prompts().is_none().then(|| not_needed(why))
    }

    /// Optimizer steps of a round of sampling, as TRL counts them.
    pub fn optimizer_steps(&self) -> u64 {
        (self.completions / self.mini.max(1)).max(1) * self.passes
    }

    /// A number of optimizer steps as rounds of sampling.
    pub fn rounds(&self, optimizer_steps: u64) -> u64 {
        optimizer_steps.div_ceil(self.optimizer_steps())
    }

    /// How completions became prompts.
    pub fn note(&self) -> String {
        let devices = self.devices.unwrap_or(1);
        let plural = if devices == 1 { "" } else { "s" };
        format!("{} completions a round on {devices} device{plural}, {} a prompt", self.completions, self.group)
    }
}
