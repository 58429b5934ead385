//! A configuration put together in code.

use super::critic::CriticConfig;
use super::lora::LoraSettings;
use super::model::ModelConfig;
use super::rollout::RolloutConfig;
use super::run::RunConfig;
use super::sft::{SftConfig, WarmupConfig};
use super::trainer::TrainerConfig;
use super::update::UpdateConfig;
use crate::objective::{Objective, ObjectiveConfig};
use crate::optim::OptimConfig;
use crate::task::TaskConfig;
use crate::{Error, Result};
use firebrick_backends::{DeviceSpec, Precision};
use firebrick_plan::{AppliedPreset, MemoryConfig, PRECISION};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Puts a [`RunConfig`] together: see [`RunConfig::builder`].
#[derive(Clone, Debug, Default)]
pub struct RunConfigBuilder {
    config: RunConfig,
    /// Whether the precision was set, which a preset then leaves as it is.
    precise: bool,
}

impl RunConfig {
    /// Puts a configuration together section by section. It needs a model and an output folder; every other section is
    /// that of [`RunConfig::default`] until it is set.
    ///
    /// ```
    /// use firebrick_engine::config::{RolloutConfig, RunConfig, parse};
    /// use firebrick_engine::objective::Algorithm;
    /// use firebrick_engine::task::{ArithmeticConfig, TaskConfig};
    ///
    /// let mut config = RunConfig::builder()
    ///     .model_path("models/Qwen3-0.6B")
    ///     .task(TaskConfig::Arithmetic(ArithmeticConfig::default()))
    ///     .output("runs/sums")
    ///     .objective(Algorithm::Dapo)
    ///     .rollout(RolloutConfig { n: 16, ..RolloutConfig::default() })
    ///     .build()?;
    /// config.trainer.steps = 50; // fields are public; `Trainer::builder` checks them again
    ///
    /// let yaml = "
    /// model: {path: models/Qwen3-0.6B}
    /// task: {kind: arithmetic}
    /// output: runs/sums
    /// objective: dapo
    /// rollout: {n: 16}
    /// trainer: {steps: 50}
    /// ";
    /// assert_eq!(config, parse(yaml, &[])?);
    /// # Ok::<(), firebrick_engine::Error>(())
    /// ```
    #[must_use]
    pub fn builder() -> RunConfigBuilder {
        RunConfigBuilder::default()
    }

    /// The configuration as a run uses it: settings that follow from others are filled in (a critic with default
    /// settings where the objective needs one, the defaults of new `LoRA` adapters), and everything is checked. Reading
    /// a configuration file does this, and so do [`RunConfigBuilder::build`] and
    /// [`TrainerBuilder::build`](crate::trainer::TrainerBuilder::build).
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with the key of a setting that cannot work: see [`check`](Self::check).
    pub fn resolve(mut self) -> Result<Self> {
        self.complete();
        self.check()?;
        if let Some(lora) = &mut self.model.lora {
            lora.spell_out();
        }
        if let Some(task) = &mut self.task {
            task.spell_out();
        }
        Ok(self)
    }

    /// Fills in a critic with default settings where the objective needs one.
    pub(super) fn complete(&mut self) {
        if self.objective.build().is_ok_and(|own| own.needs().values) {
            self.critic.get_or_insert_default();
        }
    }
}

impl RunConfigBuilder {
    /// The whole `model` section.
    #[must_use]
    pub fn model(mut self, model: ModelConfig) -> Self {
        self.config.model = model;
        self
    }

    /// Starts from a Hugging Face checkpoint folder. A relative path is relative to where the program runs, as all
    /// paths are.
    #[must_use]
    pub fn model_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.config.model.path = Some(path.into());
        self
    }

    /// Starts from random weights of an architecture: keys and values of a Hugging Face `config.json` (`model_type`,
    /// `hidden_size`, …). `vocab_size` is the tokenizer's unless it is given.
    #[must_use]
    pub fn model_arch<K: Into<String>>(mut self, config: impl IntoIterator<Item = (K, Value)>) -> Self {
        let entries = config.into_iter().map(|(key, value)| (key.into(), value));
        self.config.model.arch = Some(entries.collect());
        self
    }

    /// With [`model_arch`](Self::model_arch): a folder with tokenizer files. Without it, every character of the task's
    /// alphabet is a token.
    #[must_use]
    pub fn tokenizer(mut self, folder: impl Into<PathBuf>) -> Self {
        self.config.model.tokenizer = Some(folder.into());
        self
    }

    /// Trains `LoRA` adapters; the model's own weights stay as they are.
    #[must_use]
    pub fn lora(mut self, lora: LoraSettings) -> Self {
        self.config.model.lora = Some(lora);
        self
    }

    /// Prompts and rewards. Not needed with a task of your own
    /// ([`TrainerBuilder::task`](crate::trainer::TrainerBuilder::task)).
    #[must_use]
    pub fn task(mut self, task: TaskConfig) -> Self {
        self.config.task = Some(task);
        self
    }

    /// The run folder: it is created, and must not hold another run.
    #[must_use]
    pub fn output(mut self, folder: impl Into<PathBuf>) -> Self {
        self.config.output = folder.into();
        self
    }

    /// The objective: an [`Algorithm`](crate::objective::Algorithm) with its own settings, or settings one by one.
    #[must_use]
    pub fn objective(mut self, objective: impl Into<ObjectiveConfig>) -> Self {
        self.config.objective = objective.into();
        self
    }

    /// Sampling during training and validation.
    #[must_use]
    pub fn rollout(mut self, rollout: RolloutConfig) -> Self {
        self.config.rollout = rollout;
        self
    }

    /// How rollouts become optimizer steps.
    #[must_use]
    pub fn update(mut self, update: UpdateConfig) -> Self {
        self.config.update = update;
        self
    }

    /// The policy's optimizer in RL steps.
    #[must_use]
    pub fn optim(mut self, optim: OptimConfig) -> Self {
        self.config.optim = optim;
        self
    }

    /// The critic of an objective that has one. Without it, such an objective gets [`CriticConfig::default`].
    #[must_use]
    pub fn critic(mut self, critic: CriticConfig) -> Self {
        self.config.critic = Some(critic);
        self
    }

    /// Number of steps, batch size, seed, and how often the run validates and saves.
    #[must_use]
    pub fn trainer(mut self, trainer: TrainerConfig) -> Self {
        self.config.trainer = trainer;
        self
    }

    /// Supervised training before the first RL step.
    #[must_use]
    pub fn warmup(mut self, sft: SftConfig) -> Self {
        self.config.warmup = WarmupConfig { sft: Some(sft) };
        self
    }

    /// Supervised training, for a run in [`Mode::Sft`](super::Mode::Sft).
    #[must_use]
    pub fn sft(mut self, sft: SftConfig) -> Self {
        self.config.sft = Some(sft);
        self
    }

    /// Memory settings, or a [`Preset`](firebrick_plan::Preset) of them. Sizes are in bytes and tokens. What a preset
    /// sets outside of this section is set by [`build`](Self::build): the precision unless
    /// [`precision`](Self::precision) was called, and keys of `rollout` that have their default.
    #[must_use]
    pub fn memory(mut self, memory: impl Into<MemoryConfig>) -> Self {
        self.config.memory = memory.into();
        self
    }

    /// The device that computes; by default the best one.
    #[must_use]
    pub fn device(mut self, device: DeviceSpec) -> Self {
        self.config.device = device;
        self
    }

    /// The float type of parameters and activations; by default f32.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        self.precise = true;
        self
    }

    /// The configuration, [resolved](RunConfig::resolve) and checked.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with the key of a setting that cannot work, or of what is missing: a
    /// model, the output folder.
    pub fn build(mut self) -> Result<RunConfig> {
        self.take_preset()?;
        self.config.resolve()
    }

    /// Takes what the preset of the memory section sets beside it, as a file with the same settings does.
    fn take_preset(&mut self) -> Result<()> {
        let config = &mut self.config;
        let Some(preset) = config.memory.preset else {
            return Ok(());
        };
        let mut memory = changed(&config.memory, &MemoryConfig::from(preset));
        memory.insert("preset".into(), preset.name().into());
        let rollout = changed(&config.rollout, &RolloutConfig::default());
        let mut root = Map::new();
        root.insert("memory".into(), Value::Object(memory));
        root.insert("rollout".into(), Value::Object(rollout));
        if self.precise {
            root.insert(PRECISION.into(), config.precision.name().into());
        }
        config.applied_preset = AppliedPreset::lay_under(&mut root);
        let unread = |e: serde_json::Error| Error::Config(format!("memory.preset: {preset}: {e}"));
        if let Some(precision) = root.remove(PRECISION) {
            config.precision = serde_json::from_value(precision).map_err(unread)?;
        }
        if let Some(rollout) = root.remove("rollout") {
            config.rollout = serde_json::from_value(rollout).map_err(unread)?;
        }
        Ok(())
    }
}

/// The keys of a section that differ from those of another.
fn changed<T: Serialize>(section: &T, from: &T) -> Map<String, Value> {
    let keys = |section: &T| match serde_json::to_value(section) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    };
    let from = keys(from);
    let own = keys(section).into_iter();
    own.filter(|(key, value)| from.get(key) != Some(value)).collect()
}

#[cfg(test)]
mod tests;
