//! The `critic` section.

use crate::executor::HeadLoss;
use crate::objective::TokenLoss;
use crate::objective::aggregate::{Denominators, LossAggMode, token_weights};
use crate::objective::value::ValueLoss;
use crate::optim::OptimConfig;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use std::path::PathBuf;

/// The `critic` section, for PPO. Names are verl's.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CriticConfig {
    /// Model that the critic starts from.
    pub model: CriticModel,
    /// Optimizer of the critic.
    #[default(OptimConfig { lr: 1e-5, ..OptimConfig::default() })]
    pub optim: OptimConfig,
    /// First steps, in which only the critic is updated.
    pub warmup: u64,
    /// Clip range of value changes per step; a large value disables clipping.
    #[default(0.5)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub cliprange_value: f64,
    /// Reduction of the token losses.
    #[default(LossAggMode::TokenMean)]
    pub loss_agg_mode: LossAggMode,
    /// Ulysses degree of the critic. Must divide the ranks and its query heads. `null`:
    /// `memory.ulysses_sequence_parallel_size`.
    #[schemars(range(min = 1))]
    pub ulysses_sequence_parallel_size: Option<usize>,
    /// Use a value head on the policy, with one optimizer and memory plan, instead of a second model. Rejects `model`,
    /// `optim`, `warmup`, `ulysses_sequence_parallel_size` and `memory.critic`.
    pub shared_trunk: bool,
    /// Weight of the value loss with `shared_trunk`.
    #[default(0.1)]
    #[schemars(extend("exclusiveMinimum" = 0, "x-because" = "otherwise nothing trains the value head"))]
    pub vf_coef: f64,
    /// Peak learning rate of the value head with `shared_trunk`. `null`: `optim.lr`.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub head_lr: Option<f64>,
}

/// Model that a critic starts from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CriticModel {
    /// Causal language model, or `…ForSequenceClassification` or `…ForTokenClassification` model with one label, that
    /// shares the policy's tokens. `null`: the policy before the first RL step, with a new value head.
    pub path: Option<PathBuf>,
}

impl CriticConfig {
    /// Checks the settings for a run of `steps` steps.
    ///
    /// # Errors
    /// `Error::Config` with the key, its value and the allowed ones.
    pub fn check(&self, steps: u64) -> Result<()> {
        if self.shared_trunk {
            return self.check_shared();
        }
        if self.head_lr.is_some() || (self.vf_coef - Self::default().vf_coef).abs() > 0.0 {
            return Err(Error::Config(
                "critic.vf_coef and critic.head_lr require critic.shared_trunk: true; a separate critic uses critic.optim"
                    .into(),
            ));
        }
        if self.warmup >= steps {
            return Err(Error::Config(format!(
                "critic.warmup is {}, but the run has {steps} steps (trainer.steps): the policy would never be updated",
                self.warmup
            )));
        }
        Ok(())
    }

    /// Rejects settings of a separate critic.
    fn check_shared(&self) -> Result<()> {
        let separate = [
            (
                self.model != CriticModel::default(),
                "model.path loads a separate model, but critic.shared_trunk: true uses the policy's; remove one of them",
            ),
            (
                self.optim != Self::default().optim,
                "optim: with critic.shared_trunk: true policy and value head share the optimizer in `optim`; only \
                 critic.head_lr is separate",
            ),
            (
                self.ulysses_sequence_parallel_size.is_some(),
                "ulysses_sequence_parallel_size applies to a separate critic, but critic.shared_trunk: true uses the \
                 policy's; remove it, or set memory.ulysses_sequence_parallel_size",
            ),
            (
                self.warmup > 0,
                "warmup updates the critic without the policy, but with critic.shared_trunk: true they are one model; \
                 remove it, or use a separate critic",
            ),
        ];
        match separate.into_iter().find(|(is_set, _)| *is_set) {
            Some((_, message)) => Err(Error::Config(format!("critic.{message}"))),
            None => Ok(()),
        }
    }

    /// Learning rate of the value head relative to the policy's.
    pub fn value_rate(&self, policy: &OptimConfig) -> f64 {
        self.head_lr.map_or(1.0, |lr| lr / policy.lr)
    }

    /// Value loss.
    pub fn loss(&self) -> ValueLoss {
        ValueLoss { clip_range: self.cliprange_value }
    }

    /// Loss of policy and value head with a shared trunk.
    pub fn joint_loss<'l>(&self, tokens: &'l dyn TokenLoss) -> HeadLoss<'l> {
        HeadLoss::Joint { tokens, values: self.loss(), coefficient: self.vf_coef }
    }

    /// Weights of the tokens of one optimizer step, given each sequence's number of scored tokens.
    pub fn weights(&self, lengths: &[usize], max_length: usize) -> Vec<Vec<f64>> {
        let mut by = Denominators::new(lengths, max_length);
        by.scale *= by.sequences;
        token_weights(self.loss_agg_mode, lengths, by)
    }
}
