//! Builder of a configuration in code.

use super::critic::CriticConfig;
use super::lora::LoraSettings;
use super::model::ModelConfig;
use super::rollout::RolloutConfig;
use super::run::RunConfig;
use super::sft::SftConfig;
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

/// Builds a [`RunConfig`]: see [`RunConfig::builder`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct RunConfigBuilder {
    config: RunConfig,
    /// True if the precision was set, so that a preset does not change it.
    has_precision: bool,
}

impl RunConfig {
    /// Builds a configuration by sections. It needs a model and an output folder; other sections default to those of
    /// [`RunConfig::default`].
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
    pub fn builder() -> RunConfigBuilder {
        RunConfigBuilder::default()
    }

    /// The configuration with derived settings (a critic with default settings if the objective needs one, the defaults
    /// of new `LoRA` adapters), checked. Reading a configuration file, [`RunConfigBuilder::build`] and
    /// [`TrainerBuilder::build`](crate::trainer::TrainerBuilder::build) do this.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with the key of a setting that cannot work: see [`check`](Self::check).
    pub fn resolve(mut self) -> Result<Self> {
        self.complete();
        self.check()?;
        if let Some(lora) = &mut self.model.lora {
            lora.resolve();
        }
        if let Some(task) = &mut self.task {
            task.spell_out();
        }
        Ok(self)
    }

    /// Adds a critic with default settings if the objective needs one.
    pub(super) fn complete(&mut self) {
        if self.objective.build().is_ok_and(|objective| objective.needs().values) {
            self.critic.get_or_insert_default();
        }
    }
}

/// Methods that set a field of the configuration.
macro_rules! setters {
    ($($(#[$doc:meta])+ $name:ident($value:ty) => $section:ident $(. $field:ident)?;)+) => {
        impl RunConfigBuilder {
            $($(#[$doc])+
            pub fn $name(mut self, $name: $value) -> Self {
                self.config.$section $(.$field)? = $name.into();
                self
            })+
        }
    };
}

setters! {
    /// The whole `model` section.
    model(ModelConfig) => model;
    /// Trains `LoRA` adapters; the model's own weights do not change.
    lora(LoraSettings) => model.lora;
    /// Prompts and rewards. Not needed with a custom task
    /// ([`TrainerBuilder::task`](crate::trainer::TrainerBuilder::task)).
    task(TaskConfig) => task;
    /// The run folder: it is created, and must not hold another run.
    output(impl Into<PathBuf>) => output;
    /// The objective: an [`Algorithm`](crate::objective::Algorithm) with its settings, or single settings.
    objective(impl Into<ObjectiveConfig>) => objective;
    /// Sampling during training and validation.
    rollout(RolloutConfig) => rollout;
    /// Division of rollouts into optimizer steps.
    update(UpdateConfig) => update;
    /// The policy's optimizer in RL steps.
    optim(OptimConfig) => optim;
    /// The critic. An objective that needs one defaults to [`CriticConfig::default`].
    critic(CriticConfig) => critic;
    /// Number of steps, batch size, seed, and intervals of validations and checkpoints.
    trainer(TrainerConfig) => trainer;
    /// Supervised training before the first RL step.
    warmup(SftConfig) => warmup.sft;
    /// Supervised training, for a run in [`Mode::Sft`](super::Mode::Sft).
    sft(SftConfig) => sft;
    /// Memory settings, or a [`Preset`](firebrick_plan::Preset) of them. Sizes are in bytes and tokens. Other sections
    /// of a preset are set by [`build`](Self::build): the precision unless [`precision`](Self::precision) was called,
    /// and keys of `rollout` that have their default.
    memory(impl Into<MemoryConfig>) => memory;
    /// The device; by default the best one.
    device(DeviceSpec) => device;
}

impl RunConfigBuilder {
    /// Starts from a Hugging Face checkpoint folder. A relative path is relative to the working directory, as all paths
    /// are.
    pub fn model_path(mut self, path: impl Into<PathBuf>) -> Self {
        self.config.model.path = Some(path.into());
        self
    }

    /// Starts from random weights of an architecture: keys and values of a Hugging Face `config.json` (`model_type`,
    /// `hidden_size`, …). `vocab_size` defaults to the tokenizer's.
    pub fn model_arch<K: Into<String>>(mut self, config: impl IntoIterator<Item = (K, Value)>) -> Self {
        self.config.model.arch = Some(config.into_iter().map(|(key, value)| (key.into(), value)).collect());
        self
    }

    /// With [`model_arch`](Self::model_arch): a folder with tokenizer files. Without it, every character of the task's
    /// alphabet is a token.
    pub fn tokenizer(mut self, folder: impl Into<PathBuf>) -> Self {
        self.config.model.tokenizer = Some(folder.into());
        self
    }

    /// The float type of parameters and activations; by default f32.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.config.precision = precision;
        self.has_precision = true;
        self
    }

    /// The configuration, [resolved](RunConfig::resolve) and checked.
    ///
    /// # Errors
    ///
    /// [`Error::Config`](crate::Error::Config) with the key of an invalid or missing setting.
    pub fn build(mut self) -> Result<RunConfig> {
        self.apply_preset()?;
        self.config.resolve()
    }

    /// Applies the preset to other sections, as for a file with the same settings.
    fn apply_preset(&mut self) -> Result<()> {
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
        if self.has_precision {
            root.insert(PRECISION.into(), config.precision.name().into());
        }
        config.applied_preset = AppliedPreset::merge_into(&mut root);
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
    keys(section).into_iter().filter(|(key, value)| from.get(key) != Some(value)).collect()
}

#[cfg(test)]
mod tests;
