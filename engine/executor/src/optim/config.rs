//! Settings of the optimizer, and the arithmetic of `AdamW` (arXiv:1711.05101) on one tensor as `torch.optim.AdamW`
//! computes it.

use super::scale::{LossScale, Scaler};
use burn::tensor::Tensor;
use firebrick_backends::Precision;
use firebrick_backends::kernels::AdamWStep;
use firebrick_core::lr_scheduler::LrSchedulerConfig;
use firebrick_core::{Error, Result};
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// The `optim` section of a configuration.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimConfig {
    /// Peak learning rate.
    #[default(1e-6)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lr: f64,
    /// Decay of first and second moment, from 0 to below 1.
    #[default([0.9, 0.999])]
    #[schemars(extend("items" = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}))]
    pub betas: [f64; 2],
    /// Added to the root of the second moment.
    #[default(1e-8)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub eps: f64,
    /// Decoupled weight decay.
    #[default(0.01)]
    #[schemars(range(min = 0))]
    pub weight_decay: f64,
    /// Also decay norm weights and biases, as verl does.
    pub decay_norms_and_biases: bool,
    /// Maximum global gradient norm. `null` disables clipping.
    #[default(Some(1.0))]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub clip_grad: Option<f64>,
    /// Factor of the loss in the backward pass. `null`: `dynamic` in f16, else none.
    pub loss_scale: Option<LossScale>,
    /// Learning-rate schedule. Keys that its type does not use are rejected.
    pub lr_scheduler: LrSchedulerConfig,
}

impl OptimConfig {
    /// Refuses a schedule that cannot work over so many steps.
    ///
    /// # Errors
    /// `Error::Config` with the key.
    pub fn check_schedule(&self, section: &str, steps: u64) -> Result<()> {
        self.lr_scheduler.build(self.lr, steps).map(|_| ()).map_err(|e| {
            let within = if e.setting == "lr" { "" } else { "lr_scheduler." };
            Error::Config(format!("{section}.{within}{}: {}", e.setting, e.detail))
        })
    }

    /// Loss scaling of a model in a precision.
    pub fn scaler(&self, precision: Precision) -> Option<Scaler> {
        let fixed = self.loss_scale;
        let usual = (precision == Precision::F16).then_some(LossScale::DYNAMIC);
        fixed.or(usual).map(Scaler::new)
    }

    /// Factor of gradients with this global norm: `torch.nn.utils.clip_grad_norm_`'s coefficient, at most one.
    pub fn clip_coefficient(&self, grad_norm: f64) -> f64 {
        self.clip_grad.map_or(1.0, |max| (max / (grad_norm + 1e-6)).min(1.0))
    }

    /// The numbers of one update of a parameter whose gradient is multiplied by `clip`.
    pub fn step(&self, at: UpdateAt, clip: f64) -> AdamWStep {
        let step = i32::try_from(at.step).unwrap_or(i32::MAX);
        let [b1, b2] = self.betas;
        AdamWStep {
            clip,
            betas: self.betas,
            eps: self.eps,
            second_root: (1.0 - b2.powi(step)).sqrt(),
            rate: at.lr / (1.0 - b1.powi(step)),
            keep: if at.decays { 1.0 - at.lr * self.weight_decay } else { 1.0 },
        }
    }

    /// `AdamW` on one tensor: its new value and moments. `gradient` is already clipped; no `moments` are zero ones.
    /// Value, gradient and moments are of one shape, `[rows, columns]`.
    pub fn update(
        &self,
        at: UpdateAt,
        value: Tensor<2>,
        gradient: Tensor<2>,
        moments: Option<Moments>,
    ) -> (Tensor<2>, Moments) {
        let [b1, b2] = self.betas;
        let step = self.step(at, 1.0);
        let squared = gradient.clone() * gradient.clone() * (1.0 - b2);
        let scaled = gradient * (1.0 - b1);
        let (first, second) = match moments {
            Some(m) => (m.first * b1 + scaled, m.second * b2 + squared),
            None => (scaled, squared),
        };
        let denominator = second.clone().sqrt() / step.second_root + self.eps;
        let change = first.clone() / denominator * step.rate;
        let value = if at.decays && self.weight_decay != 0.0 { value * step.keep } else { value };
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
    /// True if weight decay applies to it.
    pub decays: bool,
}

/// First and second moments of a parameter, in its shape `[rows, columns]`.
#[derive(Clone, Debug)]
pub struct Moments {
    /// Running mean of the gradient (`exp_avg`).
    pub first: Tensor<2>,
    /// Running mean of its square (`exp_avg_sq`).
    pub second: Tensor<2>,
}
