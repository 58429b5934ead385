//! A KL penalty in the rewards: its estimator, and its coefficient, fixed or steered towards a target
//! (arXiv:1909.08593).

use super::kl::KlType;

/// The relative error is clamped to ± this.
const MAX_ERROR: f64 = 0.2;

/// The KL to the reference policy as a penalty in each token's reward (verl's `use_kl_in_reward`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlInReward {
    /// Its estimator (verl's `kl_penalty`).
    pub estimator: KlType,
    /// Its coefficient (verl's `kl_ctrl`).
    pub controller: KlController,
}

/// The coefficient of a KL penalty (verl's `kl_ctrl`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KlController {
    /// It stays.
    Fixed {
        /// The coefficient.
        coef: f64,
    },
    /// It follows the measured KL.
    Adaptive {
        /// The coefficient that it starts from.
        start: f64,
        /// KL of a completion token that it aims at.
        target: f64,
        /// Completions over which it can change by a fifth of itself.
        horizon: f64,
    },
}

impl KlController {
    /// The coefficient of the first step.
    pub fn start(self) -> f64 {
        match self {
            Self::Fixed { coef } => coef,
            Self::Adaptive { start, .. } => start,
        }
    }

    /// The coefficient after `n` completions whose mean KL was `current`:
    /// β (1 + clip(KL / target − 1, ±0.2) · n / horizon) where it moves.
    pub fn next(self, coefficient: f64, current: f64, n: usize) -> f64 {
        match self {
            Self::Fixed { .. } => coefficient,
            Self::Adaptive { target, horizon, .. } => {
                let error = (current / target - 1.0).clamp(-MAX_ERROR, MAX_ERROR);
                coefficient * (1.0 + error * n as f64 / horizon)
            }
        }
    }
}

/// Token-level rewards of one completion (verl's `token_level_rewards`): its score on the last token, less
/// `coefficient` · KL on every token.
pub fn token_level_rewards(score: f64, kl: &[f64], coefficient: f64) -> Vec<f64> {
    let mut rewards: Vec<f64> = kl.iter().map(|kl| -coefficient * kl).collect();
    if let Some(last) = rewards.last_mut() {
        *last += score;
    }
    rewards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_coefficient_stays_and_an_adaptive_one_goes_towards_its_target() {
        let fixed = KlController::Fixed { coef: 0.3 };
        assert!((fixed.next(0.3, 9.0, 100) - 0.3).abs() < 1e-15);
        let adaptive = KlController::Adaptive { start: 0.3, target: 0.1, horizon: 10_000.0 };
        assert!(adaptive.next(0.3, 9.0, 100) > 0.3, "too far away: more weight");
        assert!(adaptive.next(0.3, 0.0, 100) < 0.3, "too close: less");
        assert!((adaptive.next(0.3, 0.1, 100) - 0.3).abs() < 1e-12);
    }

    #[test]
    fn the_score_stands_on_the_last_token_and_the_penalty_on_all() {
        let rewards = token_level_rewards(1.0, &[0.5, -1.0], 0.5);
        assert!((rewards[0] + 0.25).abs() < 1e-12 && (rewards[1] - 1.5).abs() < 1e-12);
        assert!(token_level_rewards(1.0, &[], 0.5).is_empty());
    }
}
