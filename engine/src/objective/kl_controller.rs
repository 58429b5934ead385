//! The coefficient of a KL penalty: fixed, or steered towards a target (arXiv:1909.08593).

use serde::{Deserialize, Serialize};

/// Most that one update changes the coefficient by, as a share of `n / horizon`.
const MOST_ERROR: f64 = 0.2;

/// Whether the coefficient moves (verl's `kl_ctrl.type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KlControl {
    /// It stays.
    #[default]
    Fixed,
    /// It follows the measured KL.
    Adaptive,
}

/// Settings of the controller, under verl's names (`algorithm.kl_ctrl`).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct KlControlConfig {
    /// Whether the coefficient moves.
    #[serde(rename = "type")]
    pub kind: KlControl,
    /// The coefficient, or the one it starts from.
    pub kl_coef: f64,
    /// KL of a completion token that an adaptive coefficient aims at.
    pub target_kl: f64,
    /// Completions over which an adaptive coefficient can change by a fifth of itself.
    pub horizon: f64,
}

impl Default for KlControlConfig {
    fn default() -> Self {
        Self {
            kind: KlControl::Fixed,
            kl_coef: 0.001,
            target_kl: 0.1,
            horizon: 10_000.0,
        }
    }
}

impl KlControlConfig {
    /// Refuses settings that make no sense; `section` is where they stand in the config.
    pub fn check(&self, section: &str) -> Result<(), String> {
        if !(self.kl_coef.is_finite() && self.kl_coef >= 0.0) {
            return Err(format!("{section}.kl_coef should be 0 or more"));
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        if !positive(self.target_kl) || !positive(self.horizon) {
            return Err(format!(
                "{section}: target_kl and horizon should be above 0"
            ));
        }
        if self.kind == KlControl::Adaptive && self.kl_coef == 0.0 {
            return Err(format!(
                "{section}.kl_coef is 0, and an adaptive coefficient is multiplied: it would stay 0; start from above 0"
            ));
        }
        Ok(())
    }

    /// The coefficient after `n` completions whose mean KL was `current`:
    /// β (1 + clip(KL / target − 1, ±0.2) · n / horizon) where it moves.
    #[must_use]
    pub fn next(&self, coefficient: f64, current: f64, n: usize) -> f64 {
        match self.kind {
            KlControl::Fixed => coefficient,
            KlControl::Adaptive => {
                let error = (current / self.target_kl - 1.0).clamp(-MOST_ERROR, MOST_ERROR);
                coefficient * (1.0 + error * n as f64 / self.horizon)
            }
        }
    }
}

/// Token-level rewards of one completion: its score on the last token, less the KL penalty of every token.
#[must_use]
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
        let fixed = KlControlConfig::default();
        assert!((fixed.next(0.3, 9.0, 100) - 0.3).abs() < 1e-15);
        let adaptive = KlControlConfig {
            kind: KlControl::Adaptive,
            ..fixed
        };
        assert!(
            adaptive.next(0.3, 9.0, 100) > 0.3,
            "too far away: more weight"
        );
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
