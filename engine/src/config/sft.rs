//! Settings of supervised training.

use crate::optim::OptimConfig;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Optimizer steps where neither `steps` nor `epochs` is given.
const DEFAULT_STEPS: u64 = 100;

/// Supervised training, on rows of a file or on the task's solutions.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SftConfig {
    /// Optimizer steps; 100 where `epochs` is absent too.
    pub steps: Option<u64>,
    /// Instead of `steps`: passes over the examples, every example once in each.
    pub epochs: Option<u64>,
    /// Examples a step.
    pub batch_size: usize,
    /// Rows to learn from instead of the task's solutions, of `messages` or of `prompt` and `completion`: a JSON or
    /// Parquet file, a folder, a pattern, or a dataset of the Hub.
    pub train: Option<PathBuf>,
    /// In `sft`: rows of the same kind for `val/loss`; the task's held-out solutions where absent.
    pub validation: Option<PathBuf>,
    /// Most tokens of a row; longer ones are left out and counted. The model's context where absent.
    pub max_length: Option<usize>,
    /// In `warmup.sft`: validation reward that ends the warm-up early, looked at every ten steps, so that RL starts
    /// from about the same place whatever the seed.
    pub until_reward: Option<f64>,
    /// The optimizer.
    pub optim: OptimConfig,
}

impl Default for SftConfig {
    fn default() -> Self {
        Self {
            steps: None,
            epochs: None,
            batch_size: 32,
            train: None,
            validation: None,
            max_length: None,
            until_reward: None,
            optim: OptimConfig { lr: 1e-5, ..OptimConfig::default() },
        }
    }
}

impl SftConfig {
    /// Refuses settings that cannot work. `warm_up`: whether they are `warmup.sft` and not `sft`.
    pub(super) fn check(&self, section: &str, warm_up: bool) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("{section}{what}")));
        self.optim.check(&format!("{section}.optim"))?;
        if self.steps.is_some() && self.epochs.is_some() {
            return bad(": steps and epochs are exclusive; set only one");
        }
        if self.batch_size == 0 || self.steps == Some(0) || self.epochs == Some(0) {
            return bad(": steps, epochs and batch_size must be at least 1");
        }
        if self.max_length.is_some_and(|n| n < 2) {
            return bad(".max_length must be at least 2: a token and the next one");
        }
        if self.max_length.is_some() && self.train.is_none() && self.validation.is_none() {
            return bad(
                ".max_length applies to the rows of a file: set train, or remove it (rollout.prompt_length limits the task's \
                 prompts)",
            );
        }
        if !warm_up && self.until_reward.is_some() {
            return bad(".until_reward: only warmup.sft can stop early");
        }
        if warm_up && self.validation.is_some() {
            return bad(".validation: only `firebrick sft` reports val/loss; remove it");
        }
        Ok(())
    }

    /// Optimizer steps over so many examples; `None` where they are endless.
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

/// What runs before the first RL step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WarmupConfig {
    /// Supervised training, on rows of a file or on the task's solutions.
    pub sft: Option<SftConfig>,
}
