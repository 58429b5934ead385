//! Loss scaling (arXiv:1710.03740): in f16 small gradients vanish, so they are taken of a multiple of the loss, and
//! divided again in f32 before anything looks at them.

use serde::{Deserialize, Serialize};

/// `loss_scale` of an `optim` section.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(untagged)]
pub enum LossScale {
    /// Constant factor.
    Fixed(#[schemars(extend("exclusiveMinimum" = 0, "x-because" = "`dynamic` adapts it"))] f64),
    /// Adaptive factor.
    Named(Named),
}

/// Scales with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Named {
    /// Starts at 65,536, halves on overflow and doubles after 2,000 steps without (`GradScaler`).
    Dynamic,
}

impl LossScale {
    /// The scale that follows the gradients.
    pub const DYNAMIC: Self = Self::Named(Named::Dynamic);
}

/// First value of a dynamic scale.
const FIRST: f64 = 65_536.0;

/// Applied steps in a row after which it doubles.
const INTERVAL: u32 = 2_000;

/// A loss scale on its way through a run.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct Scaler {
    /// Factor of the loss.
    pub scale: f64,
    /// Applied steps since it last changed.
    pub since: u32,
    /// True if it changes.
    pub dynamic: bool,
}

impl Scaler {
    /// Before the first step.
    pub fn new(scale: LossScale) -> Self {
        let (scale, dynamic) = match scale {
            LossScale::Fixed(scale) => (scale, false),
            LossScale::Named(Named::Dynamic) => (FIRST, true),
        };
        Self { scale, since: 0, dynamic }
    }

    /// Gradients were finite and applied.
    pub fn applied(&mut self) {
        if !self.dynamic {
            return;
        }
        self.since += 1;
        if self.since == INTERVAL {
            self.scale *= 2.0;
            self.since = 0;
        }
    }

    /// Gradients were not finite. Whether a smaller scale may mend that.
    pub fn overflowed(&mut self) -> bool {
        if !self.dynamic || self.scale <= 1.0 {
            return false;
        }
        self.scale /= 2.0;
        self.since = 0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is(scaler: Scaler, scale: f64) -> bool {
        (scaler.scale - scale).abs() < f64::EPSILON
    }

    #[test]
    fn it_halves_on_overflow_down_to_one_and_doubles_after_an_interval_without() {
        let mut scaler = Scaler::new(LossScale::DYNAMIC);
        assert!(scaler.overflowed() && scaler.overflowed());
        assert!(is(scaler, FIRST / 4.0));
        for _ in 0..INTERVAL - 1 {
            scaler.applied();
        }
        assert!(is(scaler, FIRST / 4.0));
        scaler.applied();
        assert!(is(scaler, FIRST / 2.0));
        while scaler.overflowed() {}
        assert!(is(scaler, 1.0));
    }

    #[test]
    fn a_fixed_scale_stays() {
        let mut scaler = Scaler::new(serde_json::from_str("32768").unwrap());
        assert!(!scaler.overflowed());
        scaler.applied();
        assert!(is(scaler, 32_768.0));
        let named: LossScale = serde_json::from_str("\"dynamic\"").unwrap();
        assert_eq!(named, LossScale::DYNAMIC);
    }
}
