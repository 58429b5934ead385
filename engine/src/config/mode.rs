//! Which command a configuration is for, and the supervised part of either.

use super::run::RunConfig;
use super::sft::SftConfig;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Which of the two kinds of training a run is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Reinforcement learning: `firebrick train`.
    #[default]
    Rl,
    /// Supervised training: `firebrick sft`.
    Sft,
}

/// The command that a configuration is written for: `firebrick sft` where it has an `sft` section, or rows to learn
/// from and no task; else `firebrick train`.
#[must_use]
pub fn mode_of(config: &RunConfig) -> Mode {
    if config.sft.is_some() || needs_no_task(config) { Mode::Sft } else { Mode::Rl }
}

/// Whether a configuration does without a task: it trains on the rows of a file.
#[must_use]
pub fn needs_no_task(config: &RunConfig) -> bool {
    let sft = config.sft.as_ref().or(config.warmup.sft.as_ref());
    config.task.is_none() && sft.is_some_and(|sft| sft.train.is_some())
}

/// The supervised part of a mode, and the name of its section in the configuration.
///
/// # Errors
/// `firebrick sft` without an `sft` or `warmup.sft` section.
pub fn sft_of(config: &RunConfig, mode: Mode) -> Result<Option<(&'static str, SftConfig)>> {
    let warm_up = config.warmup.sft.clone().map(|sft| ("warmup.sft", sft));
    match mode {
        Mode::Rl => Ok(warm_up),
        Mode::Sft => {
            let own = config.sft.clone().map(|sft| ("sft", sft));
            own.or(warm_up).map(Some).ok_or_else(|| {
                Error::Config("`sft` is missing; firebrick sft reads steps, batch_size and optim from it".into())
            })
        }
    }
}
