//! How many completions and prompts TRL's batch sizes are.

use crate::facts::Facts;
use crate::python::CLASS;

/// Which of TRL's configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Grpo,
    Rloo,
    Ppo,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpo => "GRPOConfig",
            Self::Rloo => "RLOOConfig",
            Self::Ppo => "PPOConfig",
        }
    }
}

/// Keys that one class alone has, for files that do not name theirs.
const OF_PPO: [&str; 7] = [
    "num_ppo_epochs",
    "total_episodes",
    "cliprange",
    "kl_coef",
    "num_mini_batches",
    "sft_model_path",
    "whiten_rewards",
];
const OF_RLOO: [&str; 2] = ["normalize_advantages", "reward_clip_range"];

/// The class of the files' arguments.
pub(super) fn class(facts: &Facts) -> Class {
    let has = |keys: &[&str]| facts.keys().any(|key| keys.contains(&key));
    match facts.text(CLASS) {
        Some("PPOConfig") => Class::Ppo,
        Some("RLOOConfig") => Class::Rloo,
        None if has(&OF_PPO) => Class::Ppo,
        None if has(&OF_RLOO) => Class::Rloo,
        Some(_) | None => Class::Grpo,
    }
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
    /// Devices that were counted.
    pub devices: u64,
}

impl BatchSizes {
    pub fn of(facts: &Facts) -> Self {
        let count = |key: &str| facts.whole(key).and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0);
        let devices = facts.devices.or_else(|| count("num_processes")).unwrap_or(1);
        let each = count("per_device_train_batch_size").unwrap_or(8) * devices;
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
        Self {
            completions,
            group: count("num_generations").unwrap_or(8),
            mini,
            passes: count("num_iterations").unwrap_or(1),
            devices,
        }
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
        format!(
            "{} completions a round on {} device{}, {} a prompt",
            self.completions,
            self.devices,
            if self.devices == 1 { "" } else { "s" },
            self.group
        )
    }
}
