//! DPPO (arXiv:2602.04879): a bound on each token's change of probability instead of one on its ratio.

use super::terms::{PolicyTerms, Ratios, TokenPolicyLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// `−sg(min(r, c)) · A · logp`, and 0 for tokens whose probability p has moved too far in the direction of A: `p − old`
/// above `high` where A > 0, below `−low` elsewhere (DPPO-Binary-TV).
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Dppo {
    /// DPPO: largest decrease of a token's probability that is trained on.
    #[default(0.15)]
    #[schemars(range(min = 0, max = 1))]
    pub clip_divergence_low: f64,
    /// DPPO: largest increase of a token's probability that is trained on.
    #[default(0.15)]
    #[schemars(range(min = 0, max = 1))]
    pub clip_divergence_high: f64,
    /// DPPO: upper bound c of the ratio.
    #[default(20.0)]
    #[schemars(extend("exclusiveMinimum" = 1))]
    pub ratio_cap: f64,
}

impl TokenPolicyLoss for Dppo {
    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let advantage = ratios.inputs.advantage();
        let logp = ratios.logp.clone().inner();
        let old = logp.clone() - ratios.difference.clone().inner();
        let moved = logp.exp() - old.exp();
        let positive = advantage.clone().greater_elem(0.0).float();
        let risen = moved.clone().greater_elem(self.clip_divergence_high).float() * positive.clone();
        let fallen = moved.lower_elem(-self.clip_divergence_low).float() * (positive.neg() + 1.0);
        let outside = risen + fallen;
        let weight = ratios.log_ratio.clone().inner().exp().clamp_max(self.ratio_cap) * (outside.clone().neg() + 1.0);
        let unclipped = ratios.unclipped(ratios.logp.clone() * (weight * advantage.neg()));
        PolicyTerms { clipped: outside, ..unclipped }
    }
}

#[cfg(test)]
mod tests {
    use crate::token_loss::{Scores, TokenInputs, TokenLoss};
    use crate::{Algorithm, PolicyGradient};
    use burn::tensor::{Device, Tensor};

    #[test]
    fn gradients_are_those_of_the_capped_ratio_and_0_where_a_probability_has_moved_too_far() {
        let vector = |values: &[f64]| Tensor::<1>::from_floats(values, &Device::flex());
        let logs = |p: [f64; 5]| vector(&p.map(f64::ln));
        let advantages = [1.0, 1.0, -1.0, -2.0, -1.0];
        let mut inputs = TokenInputs::new(vector(&[1.0; 5]), vector(&advantages), vec![5]);
        inputs.columns.old_logp = Some(logs([0.3, 0.45, 0.4, 0.3, 0.01]));
        let logp = logs([0.5, 0.5, 0.2, 0.2, 0.5]).autodiff().require_grad();
        let objective: PolicyGradient = Algorithm::Dppo.settings().build().expect("an objective");
        let loss = objective.loss(&Scores { logp: logp.clone(), entropy: vector(&[0.0; 5]) }, &inputs);
        let gradient = logp.grad_remove(&mut loss.total.backward()).expect("a gradient");
        let gradient: Vec<f32> = gradient.into_data().try_to_vec().expect("numbers");
        // a rise of 0.2 and a fall of 0.2 are beyond 0.15; the last ratio is 50
        let expected = [0.0, -0.5 / 0.45, 0.0, 2.0 * 0.2 / 0.3, 20.0];
        for (actual, expected) in gradient.iter().zip(expected) {
            assert!((f64::from(*actual) - expected).abs() < 1e-5, "{gradient:?}");
        }
        let clipped = loss.metrics.iter().find(|metric| metric.name == "actor/pg_clipfrac").expect("a metric");
        assert_eq!(clipped.sum.clone().into_data().try_to_vec::<f32>().expect("a number"), [2.0]);
    }
}
