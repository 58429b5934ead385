//! VESPO (arXiv:2602.10693): the log-prob weighted by a Gamma-shaped function of the whole sequence's ratio.

use super::{PolicyTerms, Ratios, TokenPolicyLoss};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// ln 1e-8: the least log of a weight, as the reference code bounds it.
const MIN_LOG: f64 = -18.420_680_743_952_367;

/// `−sg(φ(w)) · A · logp` with `φ(w) = e^λ w^k e^{−λ w}` and w the product of the sequence's ratios, of corrections
/// too. k and λ depend on the sign of A.
#[derive(Clone, Copy, Debug, PartialEq, SmartDefault, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
pub struct Vespo {
    /// VESPO: k for advantages of at least 0.
    #[default(2.0)]
    #[schemars(range(min = 0))]
    pub vespo_k_pos: f64,
    /// VESPO: λ for advantages of at least 0.
    #[default(3.0)]
    #[schemars(range(min = 0))]
    pub vespo_lambda_pos: f64,
    /// VESPO: k for negative advantages.
    #[default(3.0)]
    #[schemars(range(min = 0))]
    pub vespo_k_neg: f64,
    /// VESPO: λ for negative advantages.
    #[default(2.0)]
    #[schemars(range(min = 0))]
    pub vespo_lambda_neg: f64,
}

impl TokenPolicyLoss for Vespo {
    fn takes_corrections(&self) -> bool {
        true
    }

    fn terms(&self, ratios: &Ratios<'_>) -> PolicyTerms {
        let Ratios { log_ratio, inputs, .. } = ratios;
        let sequences = ratios.sequences();
        let mut log_w = log_ratio.clone().inner();
        if let Some(correction) = &inputs.columns.correction {
            log_w = log_w + correction.clone().log().clamp(MIN_LOG, 20.0);
        }
        let log_w = sequences.broadcast(sequences.sum(log_w).clamp(MIN_LOG, 20.0));
        let advantage = inputs.advantage();
        let negative = advantage.clone().lower_elem(0.0).float();
        let pick = |below: f64, above: f64| negative.clone() * (below - above) + above;
        let k = pick(self.vespo_k_neg, self.vespo_k_pos);
        let lambda = pick(self.vespo_lambda_neg, self.vespo_lambda_pos);
        let phi = (lambda.clone() + k * log_w.clone() - lambda * log_w.exp()).exp();
        // TRL's name
        let metrics = vec![ratios.sequence_mean("vespo/phi_seq_mean", phi.clone())];
        PolicyTerms { metrics, ..ratios.unclipped(ratios.logp.clone() * (phi * advantage.neg())) }
    }
}
