//! `AdamW` (arXiv:1711.05101) as `torch.optim.AdamW` computes it, with clipping by the global norm.

use super::schedule::ScheduleConfig;
use crate::gradients::Gradients;
use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_models::Decoder;
use serde::{Deserialize, Serialize};

/// The `optim` section of a configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// Peak learning rate.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Whether norm weights and biases decay too, as verl's optimizer does. Off, as in transformers' trainers.
    pub decay_norms_and_biases: bool,
    /// Gradients are scaled down to this global norm (verl's `clip_grad`, TRL's `max_grad_norm`); `null` turns it off.
    pub clip_grad: Option<f64>,
    /// How the rate changes over the run.
    pub lr_scheduler: ScheduleConfig,
}

impl Default for OptimConfig {
    fn default() -> Self {
        Self {
            lr: 1e-6,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.01,
            decay_norms_and_biases: false,
            clip_grad: Some(1.0),
            lr_scheduler: ScheduleConfig::default(),
        }
    }
}

impl OptimConfig {
    /// Refuses settings that cannot work; `section` is where they stand in the config.
    pub fn check(&self, section: &str) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("{section}.{what}")));
        if !(self.lr.is_finite() && self.lr >= 0.0) {
            return bad("lr should be 0 or more");
        }
        if self.betas.iter().any(|b| !(0.0..1.0).contains(b)) {
            return bad("betas should be two numbers of at least 0 and below 1");
        }
        if !(self.eps > 0.0 && self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            return bad("eps should be above 0 and weight_decay 0 or more");
        }
        if self.clip_grad.is_some_and(|c| c.is_nan() || c <= 0.0) {
            return bad("clip_grad should be above 0; null turns clipping off");
        }
        Ok(())
    }

    /// What gradients of this global norm are multiplied by: `torch.nn.utils.clip_grad_norm_`'s coefficient, at most one.
    #[must_use]
    pub fn clip_coefficient(&self, grad_norm: f64) -> f64 {
        self.clip_grad
            .map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0))
    }

    /// `AdamW` on one tensor: its new value and moments. `gradient` is already clipped; no `moments` are zero ones.
    #[must_use]
    pub fn update(
        &self,
        at: UpdateAt,
        value: Tensor<2>,
        gradient: Tensor<2>,
        moments: Option<Moments>,
    ) -> (Tensor<2>, Moments) {
        let UpdateAt { step, lr, decays } = at;
        let [b1, b2] = self.betas;
        let squared = gradient.clone() * gradient.clone() * (1.0 - b2);
        let scaled = gradient * (1.0 - b1);
        let (first, second) = match moments {
            Some(m) => (m.first * b1 + scaled, m.second * b2 + squared),
            None => (scaled, squared),
        };
        let step = i32::try_from(step).unwrap_or(i32::MAX);
        let (c1, c2) = (1.0 - b1.powi(step), 1.0 - b2.powi(step));
        let denominator = second.clone().sqrt() / c2.sqrt() + self.eps;
        let change = first.clone() / denominator * (lr / c1);
        let value = if decays && self.weight_decay != 0.0 {
            value * (1.0 - lr * self.weight_decay)
        } else {
            value
        };
        (value - change, Moments { first, second })
    }
}

/// When and how a tensor is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateAt {
    /// Optimizer step, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Whether weight decay applies to it.
    pub decays: bool,
}

/// First and second moments of a parameter.
#[derive(Clone, Debug)]
pub struct Moments {
    /// Running mean of the gradient (`exp_avg`).
    pub first: Tensor<2>,
    /// Running mean of its square (`exp_avg_sq`).
    pub second: Tensor<2>,
}

/// What an optimizer step did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepOutcome {
    /// Global norm before clipping.
    pub grad_norm: f64,
    /// False where the norm was not finite and nothing was applied.
    pub applied: bool,
}

/// `AdamW` over a decoder's parameters. Moments and update are f32 (f64 where the device computes in f64).
#[derive(Debug)]
pub struct AdamW {
    config: OptimConfig,
    moments: Vec<Option<Moments>>,
    steps: u64,
}

impl AdamW {
    /// An optimizer without history for `params` parameters.
    #[must_use]
    pub fn new(config: OptimConfig, params: usize) -> Self {
        Self {
            config,
            moments: vec![None; params],
            steps: 0,
        }
    }

    /// An optimizer that goes on from saved moments after `steps` applied steps.
    #[must_use]
    pub fn restore(config: OptimConfig, moments: Vec<Option<Moments>>, steps: u64) -> Self {
        Self {
            config,
            moments,
            steps,
        }
    }

    /// Applied steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Moments by parameter, in flat order.
    #[must_use]
    pub fn moments(&self) -> &[Option<Moments>] {
        &self.moments
    }

    /// Clips, then updates every parameter that has a gradient, at learning rate `lr`. A non-finite norm applies nothing.
    pub fn step(
        &mut self,
        decoder: &mut Decoder,
        mut gradients: Gradients,
        lr: f64,
    ) -> Result<StepOutcome> {
        let grad_norm = gradients.global_norm()?;
        if !grad_norm.is_finite() {
            return Ok(StepOutcome {
                grad_norm,
                applied: false,
            });
        }
        let scale = self.config.clip_coefficient(grad_norm);
        self.steps += 1;
        let Self {
            config,
            moments,
            steps,
        } = self;
        decoder.update(|index, spec, value| match gradients.take(index) {
            None => value,
            Some(gradient) => {
                let at = UpdateAt {
                    step: *steps,
                    lr,
                    decays: config.decay_norms_and_biases || !spec.slot.is_norm_or_bias(),
                };
                let (value, after) =
                    config.update(at, value, gradient * scale, moments[index].take());
                moments[index] = Some(after);
                value
            }
        });
        Ok(StepOutcome {
            grad_norm,
            applied: true,
        })
    }
}
