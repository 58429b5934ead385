//! The learning rate of a step, by the shape of its schedule.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// A schedule ready to be asked: settings checked, warm-up in steps.
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule {
    pub(super) base_lr: f64,
    pub(super) warmup: u64,
    pub(super) total: u64,
    pub(super) shape: Shape,
}

/// A shape with its options resolved; `floor` is a share of the full rate.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Shape {
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine { cycles: f64, floor: f64 },
    Restarts { cycles: f64 },
    Polynomial { power: f64, end: f64 },
    InverseSqrt { scale: u64 },
    Stable { stable: u64, decay: u64, rise: Curve, fall: Curve, cycles: f64, floor: f64 },
}

/// A rise or fall between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
pub enum Curve {
    /// A straight line.
    #[serde(rename = "linear")]
    Linear,
    /// A cosine.
    #[serde(rename = "cosine")]
    Cosine,
    /// 1 − √p.
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}

impl LrSchedule {
    /// The learning rate of optimizer step `step`, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        self.base_lr * self.factor(step)
    }

    /// The learning rate of a step as a share of the full rate.
    pub fn factor(&self, step: u64) -> f64 {
        let Some(after) = step.checked_sub(self.warmup) else {
            return self.warming(step);
        };
        let left = self.total.saturating_sub(self.warmup).max(1) as f64;
        let progress = after as f64 / left;
        match self.shape {
            Shape::Constant | Shape::ConstantWithWarmup => 1.0,
            Shape::Linear => self.total.saturating_sub(step) as f64 / left,
            // Past the last step a cosine rises again, as transformers' does.
            Shape::Cosine { cycles, floor } => lifted(half_cosine(cycles * 2.0 * progress), floor).max(0.0),
            Shape::Restarts { .. } if progress >= 1.0 => 0.0,
            Shape::Restarts { cycles } => half_cosine((cycles * progress) % 1.0).max(0.0),
            Shape::Polynomial { end, .. } if step > self.total => end / self.base_lr,
            Shape::Polynomial { power, end } => {
                let decayed = (self.base_lr - end) * (1.0 - progress).powf(power) + end;
                decayed / self.base_lr
            }
            Shape::InverseSqrt { scale } => {
                let shifted = after as f64 + scale as f64;
                1.0 / (shifted / scale as f64).sqrt()
            }
            Shape::Stable { stable, decay, fall, cycles, floor, .. } => match after.checked_sub(stable) {
                None => 1.0,
                Some(into) if into < decay => {
                    let progress = into as f64 / decay as f64;
                    let fallen = match fall {
                        Curve::Linear => 1.0 - progress,
                        Curve::Cosine => half_cosine(cycles * 2.0 * progress),
                        Curve::OneMinusSqrt => 1.0 - progress.sqrt(),
                    };
                    lifted(fallen, floor).max(0.0)
                }
                Some(_) => floor,
            },
        }
    }

    /// The factor of a step of the warm-up.
    fn warming(&self, step: u64) -> f64 {
        let progress = step as f64 / self.warmup as f64;
        match self.shape {
            Shape::Constant => 1.0,
            Shape::Stable { rise, floor, .. } => {
                let risen = match rise {
                    Curve::Linear => progress,
                    Curve::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
                    Curve::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
                };
                lifted(risen, floor).max(0.0)
            }
            _ => progress,
        }
    }
}

/// 1 at 0, 0 at 1.
fn half_cosine(progress: f64) -> f64 {
    0.5 * (1.0 + (PI * progress).cos())
}

/// Maps 0..1 to floor..1.
fn lifted(factor: f64, floor: f64) -> f64 {
    factor * (1.0 - floor) + floor
}
