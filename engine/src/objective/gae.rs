//! Generalised advantage estimation (arXiv:1506.02438) and whitening, on plain slices.

/// Added to the variance before its root is taken (verl).
const WHITEN_EPS: f64 = 1e-8;

/// Discount and decay of the estimator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gae {
    /// γ: what a reward one token later is worth.
    pub gamma: f64,
    /// λ: 0 trusts the critic's next value alone, 1 the rewards alone.
    pub lam: f64,
}

impl Gae {
    /// Advantages and returns of one sequence. From the last token back, `δ_t = r_t + γ V_{t+1} − V_t` and
    /// `A_t = δ_t + γλ A_{t+1}`; the returns are A + V. A token outside the mask hands on what stands behind it: its own
    /// reward, value and advantage count for nobody.
    ///
    /// All slices are as long as the sequence.
    #[must_use]
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

/// Mean and Bessel-corrected variance of what it was made from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Whitening {
    mean: f64,
    variance: f64,
}

impl Whitening {
    /// Of the values that are scored; of fewer than two the variance is 0.
    #[must_use]
    pub fn of(scored: impl Iterator<Item = f64> + Clone) -> Self {
        let n = scored.clone().count() as f64;
        let mean = scored.clone().sum::<f64>() / n.max(1.0);
        let squares: f64 = scored.map(|x| (x - mean).powi(2)).sum();
        Self {
            mean,
            variance: squares / (n - 1.0).max(1.0),
        }
    }

    /// (x − mean) / √(variance + 1e-8).
    #[must_use]
    pub fn apply(self, x: f64) -> f64 {
        (x - self.mean) / (self.variance + WHITEN_EPS).sqrt()
    }

    /// The mean.
    #[must_use]
    pub fn mean(self) -> f64 {
        self.mean
    }

    /// The Bessel-corrected variance.
    #[must_use]
    pub fn variance(self) -> f64 {
        self.variance
    }
}

/// Share of the returns' variance that values explain: 1 − var(R − V) / (var(R) + 1e-5), as verl reports it. 1 is a perfect
/// critic, 0 one that knows no more than a constant.
#[must_use]
pub fn explained_variance(values: &[f64], returns: &[f64]) -> f64 {
    let variance = |x: &[f64]| Whitening::of(x.iter().copied()).variance;
    let rest: Vec<f64> = returns.iter().zip(values).map(|(r, v)| r - v).collect();
    1.0 - variance(&rest) / (variance(returns) + 1e-5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_discount_and_decay_an_advantage_is_what_is_still_to_come_less_the_value() {
        let rewards = [0.0, 0.5, 0.0, 1.0];
        let values = [0.3, -0.2, 0.9, 0.4];
        let gae = Gae {
            gamma: 1.0,
            lam: 1.0,
        };
        let (advantages, returns) = gae.estimate(&rewards, &values, &[true; 4]);
        for (t, advantage) in advantages.iter().enumerate() {
            let to_come: f64 = rewards[t..].iter().sum();
            assert!((returns[t] - to_come).abs() < 1e-12);
            assert!((advantage - (to_come - values[t])).abs() < 1e-12);
        }
    }

    #[test]
    fn tokens_outside_the_mask_change_nothing_for_those_inside() {
        let gae = Gae {
            gamma: 0.9,
            lam: 0.8,
        };
        let (with, _) = gae.estimate(&[0.1, 9.0, 1.0], &[0.3, -7.0, 0.2], &[true, false, true]);
        let (without, _) = gae.estimate(&[0.1, 1.0], &[0.3, 0.2], &[true; 2]);
        assert!((with[0] - without[0]).abs() < 1e-12 && (with[2] - without[1]).abs() < 1e-12);
    }

    #[test]
    fn whitened_values_have_mean_zero_and_variance_one() {
        let values = [3.0, -1.0, 0.5, 8.0, 2.0];
        let by = Whitening::of(values.iter().copied());
        let white = values.map(|x| by.apply(x));
        let again = Whitening::of(white.iter().copied());
        assert!(again.mean().abs() < 1e-12 && (again.variance() - 1.0).abs() < 1e-6);
        let alone = Whitening::of(std::iter::once(4.0));
        assert!(
            alone.apply(4.0).abs() < 1e-12,
            "one value deviates from nothing"
        );
    }

    #[test]
    fn a_critic_that_is_right_explains_everything_and_a_constant_nothing() {
        let returns = [0.0, 1.0, 0.5, -2.0];
        assert!((explained_variance(&returns, &returns) - 1.0).abs() < 1e-12);
        assert!(explained_variance(&[0.7; 4], &returns).abs() < 1e-4);
    }
}
