//! Settings of supervised training.

use crate::optim::OptimConfig;
use crate::{Error, Result};
use firebrick_models::tokenizer::SpecialTokens;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;

/// Optimizer steps where neither `steps` nor `epochs` is given.
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
    /// Refuses settings that cannot work. `warm_up`: whether they are `warmup.sft` and not `sft`.
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

/// Training before the first RL step.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WarmupConfig {
    /// Supervised training on rows or the task's solutions.
    pub sft: Option<SftConfig>,
}
