//! Coefficients that follow a measurement from step to step. Checkpoints keep them.

use super::config::ObjectiveConfig;
use serde::{Deserialize, Serialize};

/// An objective's coefficients that follow a measurement, as they stand.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(default)]
pub struct AdaptiveCoefficients {
    /// Adaptive weight of the entropy bonus.
    pub entropy: Option<EntropyCoefficient>,
    /// Coefficient of the KL penalty in the rewards, as the next step takes it.
    pub kl: Option<f64>,
    /// Entropy of the tokens that the bonus of the step at hand acts on, where those are not all.
    #[serde(skip)]
    pub measured: Option<f64>,
}

/// An adaptive entropy bonus: a weight that rises while the entropy is at or below its target, and acts then only
/// (Skywork-OR1, arXiv:2505.22312; TRL's `use_adaptive_entropy`).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
pub struct EntropyCoefficient {
    /// The weight now.
    pub coeff: f64,
    /// Mean entropy in the last optimizer step; none before the first.
    pub measured: Option<f64>,
}

impl EntropyCoefficient {
    /// The weight that the next optimizer step applies: none while the entropy is above its target, or not yet known.
    #[must_use]
    pub fn applied(&self, target: f64) -> f64 {
        match self.measured {
            Some(entropy) if entropy <= target => self.coeff,
            _ => 0.0,
        }
    }

    /// Takes a new measurement and moves the weight by one delta.
    pub fn update(&mut self, entropy: f64, config: &ObjectiveConfig) {
        let delta = config.entropy_coef_delta;
        self.coeff = if entropy <= config.entropy_target {
            (self.coeff + delta).min(config.entropy_coef_max)
        } else {
            (self.coeff - delta).max(config.entropy_coef_min)
        };
        self.measured = Some(entropy);
    }
}

impl AdaptiveCoefficients {
    /// The adaptive weight of the entropy bonus, at its start where there was none.
    pub fn entropy_of(&mut self, config: &ObjectiveConfig) -> &mut EntropyCoefficient {
        self.entropy.get_or_insert(EntropyCoefficient {
            coeff: config.entropy_coeff,
            measured: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_weight_rises_below_the_target_and_acts_there_only() {
        let config = ObjectiveConfig {
            use_adaptive_entropy: true,
            entropy_target: 1.0,
            entropy_coef_delta: 0.1,
            entropy_coef_max: 0.25,
            ..ObjectiveConfig::default()
        };
        let mut coefficients = AdaptiveCoefficients::default();
        let control = coefficients.entropy_of(&config);
        assert!(control.applied(1.0).abs() < 1e-12, "nothing is known yet");
        let weights: Vec<f64> = [0.5, 0.5, 0.5, 2.0]
            .iter()
            .map(|&entropy| {
                control.update(entropy, &config);
                control.applied(1.0)
            })
            .collect();
        for (found, expected) in weights.iter().zip([0.1, 0.2, 0.25, 0.0]) {
            assert!((found - expected).abs() < 1e-12, "{weights:?}");
        }
        assert!((control.coeff - 0.15).abs() < 1e-12);
    }
}
