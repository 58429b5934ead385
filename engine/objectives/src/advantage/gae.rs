//! Generalised advantage estimation (arXiv:1506.02438), as PPO uses it (arXiv:1707.06347).

use super::estimator::AdvantageInputs;
use super::whitening::Whitening;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Discount and decay of the estimator.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Gae {
    /// Discount by token (`reinforce_plus_plus`, `gae`).
    #[default(1.0)]
    #[schemars(range(min = 0, max = 1))]
    pub gamma: f64,
    /// λ of `gae`: 0 looks ahead to the next value, 1 to the end.
    #[default(1.0)]
    #[schemars(range(min = 0, max = 1))]
    pub lam: f64,
}

impl Gae {
    /// Advantages and returns of one sequence. From the last token back, `δ_t = r_t + γ V_{t+1} − V_t` and
    /// `A_t = δ_t + γλ A_{t+1}`; the returns are A + V. A token outside the mask is
    /// skipped: its reward and value change nothing, and it takes the advantage of the next token.
    ///
    /// All slices are as long as the sequence.
    pub fn estimate(self, rewards: &[f64], values: &[f64], mask: &[bool]) -> (Vec<f64>, Vec<f64>) {
        let mut advantages = vec![0.0; rewards.len()];
        let (mut next_value, mut next_advantage) = (0.0, 0.0);
        for t in (0..rewards.len()).rev() {
            if mask[t] {
                let delta = rewards[t] + self.gamma * next_value - values[t];
                next_advantage = delta + self.gamma * self.lam * next_advantage;
                next_value = values[t];
            }
            advantages[t] = next_advantage;
        }
        let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
        (advantages, returns)
    }
}

/// The advantage of every token, whitened over the step's scored tokens.
pub fn gae(outcomes: AdvantageInputs<'_>, by: Gae) -> Vec<Vec<f64>> {
    let rows = outcomes.rewards.iter().zip(outcomes.values);
    let rows = rows.zip(outcomes.masks);
    let mut advantages: Vec<Vec<f64>> =
        rows.map(|((rewards, values), mask)| by.estimate(rewards, values, mask).0).collect();
    let pairs = advantages.iter().flatten();
    let scored = pairs.zip(outcomes.masks.iter().flatten());
    let white = Whitening::of(scored.filter(|(_, m)| **m).map(|(a, _)| *a));
    for advantage in advantages.iter_mut().flatten() {
        *advantage = white.apply(*advantage);
    }
    advantages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_discount_and_decay_an_advantage_is_what_is_still_to_come_less_the_value() {
        let rewards = [0.0, 0.5, 0.0, 1.0];
        let values = [0.3, -0.2, 0.9, 0.4];
        let gae = Gae { gamma: 1.0, lam: 1.0 };
        let (advantages, returns) = gae.estimate(&rewards, &values, &[true; 4]);
        for (t, advantage) in advantages.iter().enumerate() {
            let to_come: f64 = rewards[t..].iter().sum();
            assert!((returns[t] - to_come).abs() < 1e-12);
            assert!((advantage - (to_come - values[t])).abs() < 1e-12);
        }
    }

    #[test]
    fn tokens_outside_the_mask_change_nothing_for_those_inside() {
        let gae = Gae { gamma: 0.9, lam: 0.8 };
        let (with, _) = gae.estimate(&[0.1, 9.0, 1.0], &[0.3, -7.0, 0.2], &[true, false, true]);
        let (without, _) = gae.estimate(&[0.1, 1.0], &[0.3, 0.2], &[true; 2]);
        assert!((with[0] - without[0]).abs() < 1e-12 && (with[2] - without[1]).abs() < 1e-12);
    }
}
