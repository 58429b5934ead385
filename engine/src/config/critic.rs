//! The `critic` section.

use crate::objective::aggregate::{Denominators, LossAggMode, token_weights};
use crate::objective::value::ValueLoss;
use crate::optim::OptimConfig;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The critic of PPO: where it comes from and how it learns. Names are verl's.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticConfig {
    /// Where it comes from.
    pub model: CriticModel,
    /// Its optimizer.
    pub optim: OptimConfig,
    /// Steps at the start of the run in which the critic alone is updated (verl's `critic_warmup`).
    pub warmup: u64,
    /// How far a value may move in a step before its gradient ends.
    pub cliprange_value: f64,
    /// How token losses become one number.
    pub loss_agg_mode: LossAggMode,
}

/// Where a critic comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct CriticModel {
    /// A Hugging Face checkpoint folder: a causal language model, which gets a value head, or a
    /// `…ForSequenceClassification` or `…ForTokenClassification` model with one label. Absent: the policy as it is before
    /// the first RL step, with a value head.
    pub path: Option<PathBuf>,
}

impl Default for CriticConfig {
    fn default() -> Self {
        Self {
            model: CriticModel::default(),
            optim: OptimConfig {
                lr: 1e-5,
                ..OptimConfig::default()
            },
            warmup: 0,
            cliprange_value: 0.5,
            loss_agg_mode: LossAggMode::TokenMean,
        }
    }
}

impl CriticConfig {
    /// Refuses settings that cannot work in a run of so many steps.
    pub fn check(&self, steps: u64) -> Result<()> {
        self.optim.check("critic.optim")?;
        if self.cliprange_value.is_nan() || self.cliprange_value <= 0.0 {
            return Err(Error::Config(format!(
                "critic.cliprange_value is {}; a number above 0 was expected (a large one clips nothing)",
                self.cliprange_value
            )));
        }
        if self.warmup >= steps {
            return Err(Error::Config(format!(
                "critic.warmup is {}, and the run has {steps} steps (trainer.steps): the policy would never be updated",
                self.warmup
            )));
        }
        Ok(())
    }

    /// Its loss.
    #[must_use]
    pub fn loss(&self) -> ValueLoss {
        ValueLoss {
            clip_range: self.cliprange_value,
        }
    }

    /// Weights of the tokens of one optimizer step, given each sequence's number of scored tokens.
    #[must_use]
    pub fn weights(&self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
        let mut by = Denominators::new(lengths, max_length);
        by.scale *= by.sequences;
        token_weights(self.loss_agg_mode, lengths, by)
    }
}
