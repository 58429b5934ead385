//! The clipped value loss of PPO (arXiv:1707.06347), per token, and how well a critic predicts returns.

use super::advantage::Whitening;
use super::token_loss::{Loss, Metric, TokenInputs};
use burn::tensor::Tensor;

/// `½ · max((V − R)², (clip(V, V_old ± range) − R)²)`, weighted. It separates over tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueLoss {
    /// How far a value may move from the old one before its gradient ends (verl's `cliprange_value`).
    pub clip_range: f64,
}

impl ValueLoss {
    /// The loss of a chunk's values. Reads the columns `returns`, `value` (the old ones), and `value_weight` or else
    /// `weight`. Values are `[tokens]`, as each column is.
    ///
    /// # Panics
    /// If the tokens have no returns or no old values.
    pub fn loss(self, values: &Tensor<1>, inputs: &TokenInputs) -> Loss {
        let columns = &inputs.columns;
        let known = columns.returns.as_ref().zip(columns.value.as_ref());
        let (returns, old) = known.expect("a critic's tokens have returns and old values");
        let weight = columns.value_weight.clone().unwrap_or_else(|| inputs.weight());
        let square = |v: Tensor<1>| {
            let apart = v - returns.clone();
            apart.clone() * apart
        };
        // clamped by bounds, not by difference, so that a value within them stays bit-identical
        let (low, high) = (old.clone() - self.clip_range, old.clone() + self.clip_range);
        let near = values.clone().min_pair(high).max_pair(low);
        let (plain, clipped) = (square(values.clone()), square(near));
        let held = clipped.clone().greater(plain.clone()).float();
        let loss = plain.max_pair(clipped) * 0.5 * weight;
        let metrics = vec![
            Metric::weighted_sum("critic/vf_loss", loss.clone()),
            Metric::token_mean("critic/vf_clipfrac", held),
            Metric::token_mean("critic/vpred_mean", values.clone()),
        ];
        Loss { total: loss.sum(), metrics }
    }
}

/// Share of the returns' variance that values explain: 1 − var(R − V) / (var(R) + 1e-5), as verl reports it. 1 for a
/// perfect critic, 0 for a constant.
pub fn explained_variance(values: &[f64], returns: &[f64]) -> f64 {
    let variance = |x: &[f64]| Whitening::of(x.iter().copied()).variance();
    let rest: Vec<f64> = returns.iter().zip(values).map(|(r, v)| r - v).collect();
    1.0 - variance(&rest) / (variance(returns) + 1e-5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_critic_that_is_right_explains_everything_and_a_constant_nothing() {
        let returns = [0.0, 1.0, 0.5, -2.0];
        assert!((explained_variance(&returns, &returns) - 1.0).abs() < 1e-12);
        assert!(explained_variance(&[0.7; 4], &returns).abs() < 1e-4);
    }
}
