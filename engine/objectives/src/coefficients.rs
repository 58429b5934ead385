//! Coefficients that follow a measurement from step to step. Checkpoints keep them.

use super::entropy::AdaptiveEntropy;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// An objective's coefficients that follow a measurement, as they stand.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct AdaptiveCoefficients {
    /// Adaptive weight of the entropy bonus.
    pub entropy: Option<EntropyCoefficient>,
    /// Coefficient of the KL penalty in the rewards, as the next step takes it.
    pub kl: Option<f64>,
    /// Coefficients of an objective that is not one of this crate's, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub custom: BTreeMap<String, f64>,
    /// Entropy of the tokens that the bonus of the step at hand acts on, where those are not all.
    #[serde(skip)]
    pub(super) measured: Option<f64>,
}

/// The adaptive weight of an entropy bonus, as it stands. It acts only while the entropy is at or below its target.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct EntropyCoefficient {
    /// The weight now.
    pub coeff: f64,
    /// Mean entropy in the last optimizer step; none before the first.
    pub measured: Option<f64>,
}

impl EntropyCoefficient {
    /// The weight that the next optimizer step applies: none while the entropy is above its target, or not yet known.
    pub fn applied(&self, target: f64) -> f64 {
        match self.measured {
            Some(entropy) if entropy <= target => self.coeff,
            _ => 0.0,
        }
    }

    /// Takes a new measurement and moves the weight by one delta.
    pub fn update(&mut self, entropy: f64, by: &AdaptiveEntropy) {
        self.coeff = if entropy <= by.target {
            (self.coeff + by.delta).min(by.max)
        } else {
            (self.coeff - by.delta).max(by.min)
        };
        self.measured = Some(entropy);
    }
}

impl AdaptiveCoefficients {
    /// The adaptive weight of the entropy bonus, at its start where there was none.
    pub fn entropy_coefficient(&mut self, by: &AdaptiveEntropy) -> &mut EntropyCoefficient {
        self.entropy.get_or_insert(EntropyCoefficient { coeff: by.start, measured: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weight_rises_below_the_target_and_acts_there_only() {
        let by = AdaptiveEntropy { start: 0.0, target: 1.0, min: 0.0, max: 0.25, delta: 0.1 };
        let mut coefficients = AdaptiveCoefficients::default();
        let control = coefficients.entropy_coefficient(&by);
        assert!(control.applied(1.0).abs() < 1e-12, "nothing is known yet");
        let weights: Vec<f64> = [0.5, 0.5, 0.5, 2.0]
            .iter()
            .map(|&entropy| {
                control.update(entropy, &by);
                control.applied(1.0)
            })
            .collect();
        for (found, expected) in weights.iter().zip([0.1, 0.2, 0.25, 0.0]) {
            assert!((found - expected).abs() < 1e-12, "{weights:?}");
        }
        assert!((control.coeff - 0.15).abs() < 1e-12);
    }
}
