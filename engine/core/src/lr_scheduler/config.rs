//! Settings of a schedule, checked and resolved into its shape.

use firebrick_settings::violations_of;
use serde::{Deserialize, Serialize};

use super::schedule::{Curve, LrSchedule, Shape};

/// Settings of a learning-rate schedule. Keys that the chosen type does not use are rejected.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LrSchedulerConfig {
    /// Factor of `lr` after warm-up; p is the progress from 0 to 1. All optimizer steps in an RL step have one rate.
    pub lr_scheduler_type: SchedulerType,
    /// RL or supervised steps of linear warm-up from 0.
    pub warmup_steps: u64,
    /// Warm-up as a fraction of all steps, instead of `warmup_steps`.
    #[schemars(range(min = 0, max = 1))]
    pub warmup_ratio: f64,
    /// Cosine cycles c. `null`: 0.5 (falls once); `cosine_with_restarts`: 1.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["cosine", "cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay"]}))]
    pub num_cycles: Option<f64>,
    /// Exponent of `polynomial`. `null`: 1.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["polynomial"]}))]
    pub power: Option<f64>,
    /// Final rate of `polynomial`. `null`: 1e-7.
    #[schemars(range(min = 0), extend("x-with" = {"lr_scheduler_type": ["polynomial"]}))]
    pub lr_end: Option<f64>,
    /// Minimum rate of `cosine_with_min_lr`; set this or `min_lr_rate`.
    #[schemars(range(min = 0), extend("x-with" = {"lr_scheduler_type": ["cosine_with_min_lr"]}))]
    pub min_lr: Option<f64>,
    /// Minimum rate of `cosine_with_min_lr` as a fraction of `lr`.
    #[schemars(range(min = 0, max = 1), extend("x-with" = {"lr_scheduler_type": ["cosine_with_min_lr"]}))]
    pub min_lr_rate: Option<f64>,
    /// Steps t of `inverse_sqrt`. `null`: the warm-up, or 10,000.
    #[schemars(range(min = 1), extend("x-with" = {"lr_scheduler_type": ["inverse_sqrt"]}))]
    pub timescale: Option<u64>,
    /// Decay steps of `warmup_stable_decay`; required there.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["warmup_stable_decay"]}))]
    pub num_decay_steps: Option<u64>,
    /// Plateau of `warmup_stable_decay`. `null`: the remaining steps.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["warmup_stable_decay"]}))]
    pub num_stable_steps: Option<u64>,
    /// Warm-up of `warmup_stable_decay`. `null`: `linear`.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["warmup_stable_decay"]}))]
    pub warmup_type: Option<Curve>,
    /// Decay of `warmup_stable_decay`. `null`: `cosine`.
    #[schemars(extend("x-with" = {"lr_scheduler_type": ["warmup_stable_decay"]}))]
    pub decay_type: Option<Curve>,
    /// First and last factor of `warmup_stable_decay`. `null`: 0.
    #[schemars(range(min = 0, max = 1), extend("x-with" = {"lr_scheduler_type": ["warmup_stable_decay"]}))]
    pub min_lr_ratio: Option<f64>,
}

/// The shape of a schedule; transformers' `SchedulerType`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerType {
    /// 1, without warm-up.
    #[default]
    Constant,
    /// 1, after warm-up.
    ConstantWithWarmup,
    /// `1 − p`.
    Linear,
    /// `(1 + cos(2π c p)) / 2`.
    Cosine,
    /// `(1 + cos(π (c p mod 1))) / 2`, at the end 0.
    CosineWithRestarts,
    /// `m + (1 − m) · cosine`; m is `min_lr / lr` or `min_lr_rate`.
    CosineWithMinLr,
    /// `e + (1 − e) (1 − p)^power`; e is `lr_end / lr`.
    Polynomial,
    /// `1 / √(1 + s / t)` after s steps.
    InverseSqrt,
    /// 1, then a decay.
    WarmupStableDecay,
}

/// A schedule setting that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{setting}`: {detail}")]
pub struct LrSchedulerError {
    /// The setting.
    pub setting: String,
    /// Expectation, finding and remedy.
    pub detail: String,
}

fn refuse<T>(setting: &str, detail: impl Into<String>) -> Result<T, LrSchedulerError> {
    Err(LrSchedulerError { setting: setting.to_owned(), detail: detail.into() })
}

impl LrSchedulerConfig {
    /// The schedule of a run of `total_steps` optimizer steps whose full learning rate is
    /// `base_lr`.
    ///
    /// # Errors
    /// The setting, what was expected and what was found: a learning rate or a number of steps that cannot be, or a
    /// setting that the schedule does not read.
    pub fn build(&self, base_lr: f64, total_steps: u64) -> Result<LrSchedule, LrSchedulerError> {
        if !(base_lr.is_finite() && base_lr > 0.0) {
            return refuse("lr", format!("expected a learning rate above 0, found {base_lr}"));
        }
        if let Some(violation) = violations_of(self).first() {
            let (setting, detail) = violation.parts();
            return refuse(&setting, detail);
        }
        let warmup = self.warmup(total_steps)?;
        let shape = self.shape(base_lr, warmup, total_steps)?;
        Ok(LrSchedule { base_lr, warmup, total: total_steps, shape })
    }

    fn warmup(&self, total: u64) -> Result<u64, LrSchedulerError> {
        if self.warmup_ratio > 0.0 && self.warmup_steps > 0 {
            return refuse("warmup_ratio", "expected at most one of it and `warmup_steps`, found both");
        }
        let by_ratio = (total as f64 * self.warmup_ratio).ceil() as u64;
        Ok(if self.warmup_steps > 0 { self.warmup_steps } else { by_ratio })
    }

    fn shape(&self, base_lr: f64, warmup: u64, total: u64) -> Result<Shape, LrSchedulerError> {
        let cycles = self.num_cycles.unwrap_or(0.5);
        Ok(match self.lr_scheduler_type {
            SchedulerType::Constant => Shape::Constant,
            SchedulerType::ConstantWithWarmup => Shape::ConstantWithWarmup,
            SchedulerType::Linear => Shape::Linear,
            SchedulerType::Cosine => Shape::Cosine { cycles, floor: 0.0 },
            SchedulerType::CosineWithMinLr => {
                let floor = match (self.min_lr, self.min_lr_rate) {
                    (Some(rate), None) => rate / base_lr,
                    (None, Some(share)) => share,
                    _ => {
                        let detail = "`cosine_with_min_lr` needs exactly one of `min_lr` and `min_lr_rate`";
                        return refuse("min_lr", detail);
                    }
                };
                if !(0.0..=1.0).contains(&floor) {
                    let detail = format!("expected a minimum between 0 and the learning rate, found {floor} times it");
                    return refuse("min_lr", detail);
                }
                Shape::Cosine { cycles, floor }
            }
            SchedulerType::CosineWithRestarts => Shape::Restarts { cycles: self.num_cycles.unwrap_or(1.0) },
            SchedulerType::Polynomial => {
                let end = self.lr_end.unwrap_or(1e-7);
                if !(0.0..base_lr).contains(&end) {
                    let detail = format!(
                        "expected a rate from 0 up to, not including, the learning rate {base_lr}, \
                         found {end}"
                    );
                    return refuse("lr_end", detail);
                }
                Shape::Polynomial { power: self.power.unwrap_or(1.0), end }
            }
            SchedulerType::InverseSqrt => {
                Shape::InverseSqrt { scale: self.timescale.unwrap_or(if warmup == 0 { 10_000 } else { warmup }) }
            }
            SchedulerType::WarmupStableDecay => {
                let Some(decay) = self.num_decay_steps else {
                    return refuse("num_decay_steps", "`warmup_stable_decay` needs it");
                };
                let left = total.checked_sub(warmup.saturating_add(decay));
                let Some(stable) = self.num_stable_steps.or(left) else {
                    let detail = format!("{warmup} warm-up and {decay} decay steps exceed the run's {total} steps");
                    return refuse("num_decay_steps", detail);
                };
                Shape::Stable {
                    stable,
                    decay,
                    rise: self.warmup_type.unwrap_or(Curve::Linear),
                    fall: self.decay_type.unwrap_or(Curve::Cosine),
                    cycles,
                    floor: self.min_lr_ratio.unwrap_or(0.0),
                }
            }
        })
    }
}
