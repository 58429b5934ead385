//! Settings of supervised training, and the mode of a run.

use super::run::RunConfig;
use crate::optim::OptimConfig;
use crate::{Error, Result};
use firebrick_models::tokenizer::SpecialTokens;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;

/// Optimizer steps without `steps` and `epochs`.
const DEFAULT_STEPS: u64 = 100;

/// Settings of supervised training.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SftConfig {
    /// Optimizer steps. `null`, without `epochs`: 100.
    #[schemars(range(min = 1))]
    pub steps: Option<u64>,
    /// Passes over the examples, instead of `steps`; not for endless tasks.
    #[schemars(range(min = 1))]
    pub epochs: Option<u64>,
    /// Examples per step.
    #[default(32)]
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// Rows with `messages`, or `prompt` and `completion`: a file, folder, glob pattern or Hub dataset. `null`: the
    /// task's solutions.
    pub train: Option<PathBuf>,
    /// Rows for `val/loss`, only in `sft`. `null`: the task's held-out solutions.
    pub validation: Option<PathBuf>,
    /// Maximum tokens of a row or of a prompt with its solution; longer ones are skipped and counted. `null`: the model's
    /// context.
    #[schemars(range(min = 2), extend("x-because" = "a token and the next one"))]
    pub max_length: Option<usize>,
    /// `task.special_tokens` of the rows in `train` and `validation`.
    pub special_tokens: SpecialTokens,
    /// Validation reward that ends `warmup.sft` early, checked every ten steps.
    pub until_reward: Option<f64>,
    /// Optimizer of supervised training.
    #[default(OptimConfig { lr: 1e-5, ..OptimConfig::default() })]
    pub optim: OptimConfig,
}

impl SftConfig {
    /// Checks the settings of `warmup.sft` (`warm_up`) or `sft`.
    pub(super) fn check(&self, section: &str, warm_up: bool) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("{section}{what}")));
        if self.steps.is_some() && self.epochs.is_some() {
            return bad(": steps and epochs are exclusive; set only one");
        }
        if !warm_up && self.until_reward.is_some() {
            return bad(".until_reward: only warmup.sft can stop early");
        }
        if warm_up && self.validation.is_some() {
            return bad(".validation: only `firebrick sft` reports val/loss; remove it");
        }
        Ok(())
    }

    /// Optimizer steps over a number of examples; `None` for an endless task.
    ///
    /// # Errors
    /// `Error::Config` for epochs of an endless task.
    pub fn length(&self, section: &str, examples: Option<u64>) -> Result<u64> {
        match (self.epochs, examples) {
            (None, _) => Ok(self.steps.unwrap_or(DEFAULT_STEPS)),
            (Some(epochs), Some(n)) => Ok(epochs * n.div_ceil(self.batch_size as u64)),
            (Some(_), None) => Err(Error::Config(format!(
                "{section}.epochs counts passes over the examples, but the task is endless; set {section}.steps"
            ))),
        }
    }
}

/// Training before the first RL step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WarmupConfig {
    /// Supervised training on rows or the task's solutions.
    pub sft: Option<SftConfig>,
}

/// Kind of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Reinforcement learning: `firebrick train`.
    #[default]
    Rl,
    /// Supervised training: `firebrick sft`.
    Sft,
}

/// Mode that a configuration is written for: supervised with an `sft` section, or with rows and no task.
pub fn mode_of(config: &RunConfig) -> Mode {
    if config.sft.is_some() || needs_no_task(config) { Mode::Sft } else { Mode::Rl }
}

/// Returns true if a configuration needs no task: it trains on the rows of a file.
pub fn needs_no_task(config: &RunConfig) -> bool {
    let sft = config.sft.as_ref().or(config.warmup.sft.as_ref());
    config.task.is_none() && sft.is_some_and(|sft| sft.train.is_some())
}

/// Settings of supervised training in a mode, and their section in the configuration.
///
/// # Errors
/// `Error::Config` in [`Mode::Sft`] without an `sft` or `warmup.sft` section.
pub fn sft_of(config: &RunConfig, mode: Mode) -> Result<Option<(&'static str, SftConfig)>> {
    let warm_up = config.warmup.sft.clone().map(|sft| ("warmup.sft", sft));
    match mode {
        Mode::Rl => Ok(warm_up),
        Mode::Sft => {
            let sft = config.sft.clone().map(|sft| ("sft", sft));
            sft.or(warm_up).map(Some).ok_or_else(|| {
                Error::Config("`sft` is missing; firebrick sft reads steps, batch_size and optim from it".into())
            })
        }
    }
}
