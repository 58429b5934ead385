//! The implementation of [`Objective`].

use super::composition::PolicyGradient;
use crate::advantage::AdvantageEstimator;
use crate::coefficients::AdaptiveCoefficients;
use crate::entropy::EntropyBonus;
use crate::loss_sums::LossSums;
use crate::traits::{Needs, Objective, OptimizerStep};
use firebrick_core::rollout::Rollout;

/// Metric: the mean entropy of the scored tokens.
pub(super) const ENTROPY: &str = "actor/entropy";

impl Objective for PolicyGradient {
    fn needs(&self) -> Needs {
        Needs {
            reference: self.kl_loss.is_some() || self.advantages.kl_in_reward().is_some(),
            greedy: self.advantages.estimator() == Some(AdvantageEstimator::Remax),
            values: self.advantages.gae().is_some(),
            scores: self.loss.formula().chooses_tokens() || self.top_entropy.is_some(),
            entropy: self.entropy_bonus.is_some(),
        }
    }

    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        self.advantages_of(rollouts, coefficients)
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        self.prepare_step(step, coefficients);
    }

    fn update_coefficients(&self, sums: &LossSums, coefficients: &mut AdaptiveCoefficients) {
        let Some(EntropyBonus::Adaptive(by)) = &self.entropy_bonus else {
            return;
        };
        let mean_entropy = sums.values().find(|(name, _)| *name == ENTROPY);
        let measured = coefficients.measured.take().or(mean_entropy.map(|(_, v)| v));
        if let Some(entropy) = measured {
            coefficients.entropy_coefficient(by).update(entropy, by);
        }
    }
}
