//! The clipped value loss of PPO (arXiv:1707.06347), per token.

use super::{Loss, token_mean, weighted};
use burn::tensor::Tensor;

/// What is known of a critic's scored tokens, `[tokens]` each, without graph.
#[derive(Clone, Debug)]
pub struct ValueInputs {
    /// Mask and normaliser in one: the loss is the sum of weight · per-token loss.
    pub weight: Tensor<1>,
    /// What the token turned out to be worth.
    pub returns: Tensor<1>,
    /// The value before the update.
    pub old: Tensor<1>,
}

impl ValueInputs {
    /// A chunk of the tokens.
    #[must_use]
    pub fn narrow(&self, start: usize, len: usize) -> Self {
        let cut = |t: &Tensor<1>| t.clone().narrow(0, start, len);
        Self {
            weight: cut(&self.weight),
            returns: cut(&self.returns),
            old: cut(&self.old),
        }
    }
}

/// `½ · max((V − R)², (clip(V, V_old ± range) − R)²)`, weighted. It separates over tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ValueLoss {
    /// How far a value may move from the old one before its gradient ends (verl's `cliprange_value`).
    pub clip_range: f64,
}

impl ValueLoss {
    /// The loss of a chunk's values.
    #[must_use]
    pub fn loss(self, values: &Tensor<1>, inputs: &ValueInputs) -> Loss {
        let square = |v: Tensor<1>| {
            let apart = v - inputs.returns.clone();
            apart.clone() * apart
        };
        // bounds and not a clamped difference: a value inside them stays the same number
        let (low, high) = (
            inputs.old.clone() - self.clip_range,
            inputs.old.clone() + self.clip_range,
        );
        let near = values.clone().min_pair(high).max_pair(low);
        let (plain, clipped) = (square(values.clone()), square(near));
        let held = clipped.clone().greater(plain.clone()).float();
        let loss = plain.max_pair(clipped) * 0.5 * inputs.weight.clone();
        let metrics = vec![
            weighted("critic/vf_loss", loss.clone()),
            token_mean("critic/vf_clipfrac", held),
            token_mean("critic/vpred_mean", values.clone()),
        ];
        Loss {
            total: loss.sum(),
            metrics,
        }
    }
}
